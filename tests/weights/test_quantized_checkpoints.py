"""Quantized checkpoints against weights spelled out by hand: each layout written bit by bit from its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.weights.quantized_layouts import CASES, Tensors, change_config, compressed, quantize
from tests.weights.test_checkpoint import parameters
from tokenmill.config import STORED_FORMATS
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.kernels.torch_kernels import TorchKernels
from tokenmill.weights.checkpoint import read_architecture
from tokenmill.weights.gguf.folder import LINK_NAME
from tokenmill.weights.loader import check_stored, load_model


def quantized(folder: Path, case: str, rng: np.random.Generator) -> Tensors:
    make_checkpoint(folder, "qwen3", tokenizer=False, intermediate_size=64)
    return quantize(folder, *CASES[case], rng)


def load(folder: Path) -> Tensors:
    return parameters(load_model(folder, read_architecture(folder), TorchKernels(torch.float32, "cpu")))


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_checkpoint_means_what_its_format_says(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    want = quantized(tmp_path, case, rng)
    got = load(tmp_path)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name} {text}"
        )


def test_a_missing_part_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    quantized(tmp_path, "awq", rng)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.qzeros")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        InvalidCheckpoint, match=r"has no tensor model\.layers\.0\.mlp\.up_proj\.qzeros, which its quant"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quantization_config \(bitsandbytes\) is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits are not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq version 'gemv' is not supported"),
        (compressed(4, "marlin-24"), "compressed-tensors format 'marlin-24' is not supported"),
        (compressed(4, "pack-quantized", actorder="group"), "actorder 'group' is not supported"),
        (compressed(8, "float-quantized", type="float"), "weights that are not integers is not supported"),
        ({"quant_method": "compressed-tensors"}, "exactly one entry in config_groups"),
        ("int8", "quantization_config must be an object"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    change_config(tmp_path, config)
    with pytest.raises(InvalidCheckpoint, match=message) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "gguf", None])
def test_naming_the_format_of_a_checkpoint_is_a_check(method: str | None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    configs = {"awq": {"bits": 4}, "gptq": {"bits": 4}, "compressed-tensors": compressed(4, "pack-quantized")}
    if method == "gguf":
        (tmp_path / LINK_NAME).touch()
    elif method is not None:
        change_config(tmp_path, {"quant_method": method, **configs[method]})
    stored = "as floats" if method is None else f"as {method}"
    for wanted in STORED_FORMATS:
        if wanted == method:
            check_stored(tmp_path, wanted)
        else:
            with pytest.raises(InvalidConfig, match=f"--quantization {wanted}: .* is stored {stored}; leave the flag"):
                check_stored(tmp_path, wanted)
