"""Check the meaning of `--device`, of several engines too, and that torch is not imported to find no GPU."""

import sys

import pytest

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform import cuda, select
from tokenmill.platform.select import select_platform
from tokenmill.platform.torch_package import may_have_gpu


@pytest.mark.parametrize("device", ["cpu", "auto", "auto:1"])
@pytest.mark.parametrize(("shows", "works"), [(False, True), (True, False)])
def test_without_a_gpu_all_engines_run_on_the_cpu(device, shows, works, monkeypatch):
    monkeypatch.setattr(select, "may_have_gpu", lambda: shows)
    monkeypatch.setattr(cuda, "is_available", lambda: works)
    assert select_platform(device).device == "cpu"


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("auto:1", 1), ("cuda", 0), ("cuda:2", 2)])
def test_each_engine_has_a_gpu_of_its_own(device, index, monkeypatch):
    monkeypatch.setattr(select, "may_have_gpu", lambda: True)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "CudaPlatform", lambda index: index)
    assert select_platform(device) == index


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "auto:", "cpu:1", "tpu", ""])
def test_other_words_are_refused(device):
    with pytest.raises(InvalidConfig, match="is not supported"):
        select_platform(device)


def test_without_torch_there_is_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(select, "may_have_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert select_platform("auto").device == "cpu"
    with pytest.raises(InvalidConfig) as caught:
        select_platform("cuda:1")
    command = "pip install 'tokenmill[gpu]'"
    assert str(caught.value) == (
        f"--device cuda:1 needs torch, which is not installed ({command}); --device cpu does without"
    )


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "dxg", "kfd", "nvhost-gpu"])
def test_the_files_of_drivers_are_signs_of_a_gpu(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/null").touch()
    assert not may_have_gpu(tmp_path)
    (tmp_path / "dev" / name).touch()
    assert may_have_gpu(tmp_path)
