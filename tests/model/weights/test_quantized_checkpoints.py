"""Quantized checkpoints against weights spelled out by hand: each layout written bit by bit from its description."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.model.weights.quantized_layouts import CASES, Tensors, change_config, compressed, quantize
from tests.model.weights.test_checkpoint import parameters
from tokenmill.config.engine_settings import STORED_FORMATS
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.quantization.packed import UNQUANTIZED
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.gguf.folder import LINK_NAME
from tokenmill.model.weights.loader import check_stored, choose_formats, load_model
from tokenmill.model.weights.safetensors_header import BITS


def quantized(folder: Path, case: str, rng: np.random.Generator) -> Tensors:
    make_checkpoint(folder, "qwen3", tokenizer=False, intermediate_size=64)
    return quantize(folder, *CASES[case], rng)


def load(folder: Path) -> Tensors:
    return parameters(load_model(folder, read_architecture(folder), TorchKernels("float32", "cpu")))


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
def test_naming_the_format_of_a_checkpoint_is_a_check(
    method: str | None, tmp_path: Path, rng: np.random.Generator
) -> None:
    case = {"awq": "awq", "gptq": "gptq 4", "compressed-tensors": "packed 4"}.get(method or "")
    if case is not None:
        quantized(tmp_path, case, rng)
    else:
        make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    if method == "gguf":
        (tmp_path / LINK_NAME).touch()
    stored = "as floats" if method is None else f"as {method}"
    for wanted in STORED_FORMATS:
        if wanted == method:
            check_stored(tmp_path, wanted)
        else:
            with pytest.raises(InvalidConfig, match=f"--quantization {wanted}: .* is stored {stored}; leave the flag"):
                check_stored(tmp_path, wanted)


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("case", CASES)
def test_floats_stay_floats_whatever_config_json_says(
    case: str, shard_size: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, intermediate_size=64, max_shard_size=shard_size)
    want, config = load(tmp_path), CASES[case][0]
    assert not caplog.records
    change_config(tmp_path, config)
    assert choose_formats(tmp_path, None) == UNQUANTIZED, "nothing is rounded"
    got = load(tmp_path)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    (record,) = caplog.records
    assert f"config.json has a quantization_config ({config['quant_method']}), but no weight" in record.getMessage()


def test_what_is_quantized_in_part_is_what_config_json_says(
    tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    quantized(tmp_path, "awq", rng)
    load(tmp_path)
    assert choose_formats(tmp_path, None) != UNQUANTIZED
    assert not caplog.records


@pytest.mark.parametrize(
    ("case", "part", "dtype"),
    [
        ("int8", "weight", "F8_E4M3"),
        ("int8", "weight_scale", "F8_E8M0"),
        ("awq", "scales", "F8_E4M3"),
        ("gptq 8", "qweight", "F32"),
        ("packed 4", "weight_scale", "F4"),
    ],
)
def test_another_float_format_is_refused_by_name(
    case: str, part: str, dtype: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    quantized(tmp_path, case, rng)
    name = f"model.layers.1.mlp.down_proj.{part}"
    restore_as(tmp_path / "model.safetensors", name, dtype)
    with pytest.raises(InvalidCheckpoint, match=rf"tensor {name} has dtype {dtype}; supported: "):
        load(tmp_path)


def restore_as(file: Path, name: str, dtype: str) -> None:
    """Say in the header of a file that a tensor is of another type, with data of the right size where that is known."""
    header, data = split(file.read_bytes())
    entry = header[name]
    size = math.prod(entry["shape"]) * BITS.get(dtype, 4) // 8
    entry |= {"dtype": dtype, "data_offsets": [len(data), len(data) + size]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data + bytes(size))


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]
