"""Check the meaning of `--device`, of several engines too."""

import pytest

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform import cuda, select
from tokenmill.platform.select import select_platform


@pytest.mark.parametrize("device", ["cpu", "auto", "auto:1"])
def test_without_a_gpu_all_engines_run_on_the_cpu(device, monkeypatch):
    monkeypatch.setattr(select, "has_gpu", lambda: False)
    assert select_platform(device).device == "cpu"


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("auto:1", 1), ("cuda", 0), ("cuda:2", 2)])
def test_each_engine_has_a_gpu_of_its_own(device, index, monkeypatch):
    monkeypatch.setattr(select, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda, "CudaPlatform", lambda index: index)
    assert select_platform(device) == index


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "auto:", "cpu:1", "tpu", ""])
def test_other_words_are_refused(device):
    with pytest.raises(InvalidConfig, match="is not supported"):
        select_platform(device)
