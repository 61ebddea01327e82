"""Options that need torch are refused where it is not installed: by name, with the extra, before weights are read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.audio_checkpoints import make_audio_checkpoint
from tests.checkpoints import make_checkpoint
from tests.vision_checkpoints import make_vision_checkpoint
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.machine import torch_needs
from tokenmill.startup.machine.torch_needs import NEEDS, check_torch

# Heads that the native attention takes.
SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16}
ROWS: dict[str, tuple[str, dict[str, str], str, str]] = {
    "kernels": ("qwen3", {"kernels": "torch"}, "--kernels torch", "torch"),
    "dtype": ("qwen3", {"dtype": "float"}, "--dtype float32 on a CPU", "torch"),
    "attention": ("qwen3", {"attention_backend": "cpu"}, "--attention-backend cpu", "torch"),
    "machine": ("qwen3", {}, "a machine without the native kernels, which were not built,", "torch"),
    "images": ("vision", {}, "the vision tower of Qwen3VLForConditionalGeneration", "vision"),
    "sound": ("sound", {}, "the encoder of sound of Qwen2AudioForConditionalGeneration", "audio"),
}


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_needs, "available_levels", lambda: ["avx2"])


def checkpoint(family: str, folder: Path) -> Path:
    if family == "vision":
        return make_vision_checkpoint(folder)
    if family == "sound":
        return make_audio_checkpoint(folder)
    return make_checkpoint(folder, family, **SHAPE)


def refusal(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the sentence that a start without torch ends with."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidConfig) as caught:
        build_engine(config)
    return str(caught.value)


def test_the_table_is_the_tests() -> None:
    assert ROWS.keys() == NEEDS.keys()


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_refused_without_torch_and_taken_with_it(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, flags, wish, extra = ROWS[row]
    folder = checkpoint(family, tmp_path / "model")
    # Nothing of them is read.
    (folder / "model.safetensors").write_bytes(b"no weights")
    config = EngineConfig(model=str(folder), device="cpu", **flags)  # type: ignore[arg-type]
    if row == "machine":
        monkeypatch.setattr(torch_needs, "available_levels", lambda: None)
    architecture = read_architecture(folder)
    check_torch(config.resolve(), architecture, CpuPlatform())
    said = refusal(config, monkeypatch)
    assert said.startswith(wish)
    assert f" needs torch, which is not installed (pip install 'tokenmill[{extra}]')" in said
    assert said.endswith(NEEDS[row].instead or ")")


def test_a_cpu_without_the_instructions_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_needs, "available_levels", list)
    assert "(AVX2) needs torch" in refusal(EngineConfig(model="anywhere", device="cpu"), monkeypatch)


def test_a_gpu_that_is_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(EngineConfig(model="anywhere", device="cuda"), monkeypatch)
    assert said.startswith("--device cuda needs torch, which is not installed (pip install 'tokenmill[gpu]')")


def test_what_the_config_asks_for_is_refused_before_a_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(EngineConfig(model="nowhere", device="cpu", kernels="torch"), monkeypatch).startswith("--kernels")


def test_attention_that_has_no_native_kernels_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", **SHAPE | {"head_dim": 24})
    said = refusal(EngineConfig(model=str(folder), device="cpu"), monkeypatch)
    assert said.startswith("no attention backend can serve here: the native attention needs heads of a multiple of 16")
    assert said.endswith("needs torch, which is not installed (pip install 'tokenmill[torch]')")


def test_a_native_model_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = read_architecture(checkpoint("qwen3", tmp_path / "model"))
    monkeypatch.setitem(sys.modules, "torch", None)
    check_torch(EngineConfig(model="m", device="cpu", quantization="int8").resolve(), architecture, CpuPlatform())
