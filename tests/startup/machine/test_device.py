"""Choose the threads of a step, and the formats of a model on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.encoder_checkpoints import make_encoder
from tokenmill.config.configs import EngineConfig
from tokenmill.demo import demo_model_path
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.quantization.packed import ENCODER_INT8, FLOATS, QUANTIZATIONS
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.startup.machine.device import ONE_THREAD_BYTES, choose_kernels, choose_threads

LARGE = 2 * ONE_THREAD_BYTES


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_flag_decides_whatever_the_size() -> None:
    for weight_bytes in (0, LARGE):
        threads, reason = choose_threads(EngineConfig(model="m", num_threads=3), CpuPlatform(), weight_bytes)
        assert (threads, torch.get_num_threads()) == (3, 3)
        assert "--num-threads" in reason


def test_a_small_model_runs_on_one_thread() -> None:
    threads, reason = choose_threads(EngineConfig(model="m"), CpuPlatform(), ONE_THREAD_BYTES - 1)
    assert threads == 1
    assert "small" in reason


def test_a_large_model_runs_on_what_the_machine_has() -> None:
    platform = CpuPlatform()
    expected = platform.num_threads(), platform.threads_reason()
    threads, reason = choose_threads(EngineConfig(model="m"), platform, LARGE)
    assert threads == expected[0]
    assert reason.startswith(expected[1])
    assert "not bound to cores" in reason


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "num_threads", lambda self: 12)
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr("tokenmill.startup.machine.device.keep_to_nodes", lambda *engine: kept.append(engine) or True)
    threads, reason = choose_threads(EngineConfig(model="m", replica=(2, 3)), CpuPlatform(), LARGE)
    assert (threads, kept) == (4, [(2, 3)])
    assert "for 3 engines" in reason
    assert choose_threads(EngineConfig(model="m", replica=(2, 30)), CpuPlatform(), LARGE)[0] == 1


@pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
def test_formats_are_those_of_what_a_model_does(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path, "bert", hidden_size=64, num_attention_heads=4)
    for folder, rounded, wide in ((encoder, ENCODER_INT8, FLOATS), (demo_model_path(), QUANTIZATIONS["int8"], None)):
        architecture = read_architecture(folder)
        for dtype, quantization, formats in (("bfloat16", "int8", rounded), ("float32", "none", wide)):
            config = EngineConfig(model=str(folder), device="cpu", dtype=dtype, quantization=quantization)
            kernels, reason = choose_kernels(config, CpuPlatform(), folder, 1, architecture)
            assert getattr(kernels, "formats", None) == formats
            assert ("only encoders run natively in float32" in reason) == (formats is None)
