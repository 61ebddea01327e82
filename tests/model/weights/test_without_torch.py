"""Without torch, models of all native families are filled from all kinds of files, to the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.house.source_tree import ROOT
from tests.model.adapters.trained import make_adapter
from tests.model.models.test_native_decoder import FAMILIES
from tests.model.weights.digests import digest_of_adapter, digests_of_models, source_of_packed
from tests.model.weights.gguf_writer import write_gguf
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.weights.hub import fetch

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

# Whole blocks of quantized files, and of experts in four bits.
SIZES = {"hidden_size": 64, "intermediate_size": 96}

PROGRAM = """
import runpy, sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["safetensors"] = None
runpy.run_module("tests.model.weights.digests", run_name="__main__")
"""


def test_models_and_adapters_are_read_without_torch(tmp_path: Path) -> None:
    models = [
        make_checkpoint(tmp_path / family, family, dtype=torch.bfloat16, **{**SIZES, **shape})
        for family, shape in FAMILIES.items()
    ]
    for family, kind in (("qwen3", "Q8_0"), ("smollm3", "Q4_0"), ("lfm2", None)):
        models.append(fetch(str(write_gguf(tmp_path / family, family, kind)), None, tmp_path / "unpacked"))
    base, adapter, cache = tmp_path / "llama", tmp_path / "adapter", tmp_path / "cache"
    make_adapter(base, adapter, 7, r=5, lora_alpha=3)
    source, digest = source_of_packed(base, cache)
    assert source == "packed into the cache"
    want = {
        "models": digests_of_models(models),
        "dummy": digests_of_models([base], "dummy"),
        "adapter": digest_of_adapter(base, adapter),
        "packed": ["mapped from the cache", digest],
    }
    given = msgspec.json.encode([list(map(str, models)), str(base), str(adapter), str(cache)]).decode()
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){PROGRAM}", given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout) == want
