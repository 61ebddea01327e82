"""Experts that a checkpoint stacks: as transformers unpacks them, in four bits too, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_oracle, make_checkpoint
from tests.model.models.test_logits import assert_close, load
from tests.paging import PagedRequests, make_attention
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.quantization.packed import UNQUANTIZED, Mxfp4Rows
from tokenmill.model.weights.loader import choose_formats

PROJECTIONS = ("gate_up_proj", "down_proj")


def drawn(rng: np.random.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of a matrix [..., groups * 32], numbers of about 0.1."""
    blocks = torch.from_numpy(rng.integers(0, 256, (*shape, 16), dtype=np.uint8))
    return blocks, torch.from_numpy(rng.integers(120, 125, shape, dtype=np.uint8))


def test_numbers_of_four_bits_are_those_of_transformers(rng: np.random.Generator) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = drawn(rng, 3, 10, 4)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    got = np.stack([Mxfp4Rows(*pair).dequantize() for pair in zip(blocks.numpy(), scales.numpy(), strict=True)])
    assert np.array_equal(got, want.numpy())


def stacked(folder: Path, is_flipped: bool) -> None:
    """Stack the experts of a checkpoint, gate before up: outputs by inputs, or flipped."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(name for name in tensors if ".experts." in name and name.endswith(".gate_proj.weight")):
        gate, up, down = (
            tensors.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj", "down_proj")
        )
        stem = name.partition(".experts.")[0]
        experts.setdefault(f"{stem}.experts.gate_up_proj", []).append(torch.cat((gate, up)))
        experts.setdefault(f"{stem}.experts.down_proj", []).append(down)
    for name, parts in experts.items():
        values = torch.stack(parts)
        tensors[name] = (values.transpose(1, 2) if is_flipped else values).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("is_flipped", [False, True])
def test_stacks_in_either_order_are_the_experts_that_they_are_made_of(
    is_flipped: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5_moe", seed=int(rng.integers(2**31)), tokenizer=False)
    apart = load(folder)
    stacked(folder, is_flipped)
    together = load(folder)
    assert len(list(apart.targets())) > 40
    for one, other in zip(apart.layers, together.layers, strict=True):
        for own, same in zip(one.mlp.experts.gate_up, other.mlp.experts.gate_up, strict=True):
            assert torch.equal(own.weight, same.weight)
        for own, same in zip(one.mlp.experts.down, other.mlp.experts.down, strict=True):
            assert torch.equal(own.weight, same.weight)


def packed(folder: Path, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Put random experts of four bits in the place of a checkpoint's; returns what they are as floats."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path, floats = folder / "model.safetensors", {}
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(PROJECTIONS)]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = drawn(rng, num_experts, outputs, inputs // 32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return floats


def test_logits_of_experts_in_four_bits_are_those_of_their_numbers(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path, "gpt_oss", seed=int(rng.integers(2**31)), tokenizer=False)
    oracle = load_oracle(folder)
    for name, values in packed(folder, rng).items():
        oracle.get_parameter(name).data.copy_(values)
    sequence = rng.integers(0, 331, 50).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([sequence])).logits[0]
    decoder, requests = load(folder), PagedRequests([sequence], 16, rng)
    attention = make_attention("cpu", decoder.attention_spec, requests.num_pages, 16, torch.float32)
    (got,) = requests.run(decoder, attention, [[(0, 30)], [(0, 20)]])
    assert_close(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj_blocks": None}, "no tensor .*down_proj_blocks, which config.json calls for"),
        ({"down_proj_bias": None}, "no tensor .*down_proj_bias"),
        ({"gate_up_proj_scales": torch.zeros(6, 128, 3, dtype=torch.uint8)}, "not that of its blocks"),
        ({"gate_up_proj_blocks": torch.zeros(6, 128, 2, 15, dtype=torch.uint8)}, "which is no stack of experts"),
        ({"gate_up_proj_blocks": torch.zeros(6, 128, 2, 16)}, "which is no stack of experts"),
        ({"gate_up_proj_blocks": torch.zeros(5, 128, 2, 16, dtype=torch.uint8)}, "not that of its blocks"),
        ({"down_proj_bias": torch.zeros(6, 63)}, "calls for experts of"),
    ],
    ids=["no blocks", "no bias", "scales", "bytes", "floats", "experts", "bias"],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    packed(folder, rng)
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    for suffix, value in change.items():
        name = f"model.layers.1.mlp.experts.{suffix}"
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InvalidCheckpoint, match=message):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_another_format_of_floats_is_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=f"tensor {name} is (F8_E4M3|I32) .*, which is no stack of experts"):
        load(folder)


def test_experts_that_are_floats_stay_floats_whatever_config_json_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    assert choose_formats(folder, None) == UNQUANTIZED
    load(folder)
    (record,) = caplog.records
    assert "quantization_config (mxfp4), but no weight is stored so" in record.getMessage()
