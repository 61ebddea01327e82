"""The start says how native kernels are called, and why not all of a step at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tokenmill.config.configs import EngineConfig
from tokenmill.model.kernels.native import load_kernels
from tokenmill.startup.assembly.setup import build_engine

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")


@pytest.mark.parametrize(
    ("family", "flags", "sentence"),
    [
        ("smollm3", {}, ", one call a step"),
        ("granite", {}, ", one call a step"),
        ("qwen3_moe", {}, ", one call a step"),
        ("qwen3", {"attention_backend": "cpu"}, ", one call a kernel: the attention is not native"),
        ("qwen3", {"dtype": "float32"}, "not float32; only encoders run natively in float32"),
    ],
)
def test_the_reason_is_told(tmp_path: Path, family: str, flags: dict[str, Any], sentence: str) -> None:
    folder = make_checkpoint(tmp_path, family, head_dim=16)
    config = EngineConfig(model=str(folder), num_threads=1, num_pages=64, **({"dtype": "bfloat16"} | flags))
    assert build_engine(config.resolve()).ready.kernels_reason.endswith(sentence)
