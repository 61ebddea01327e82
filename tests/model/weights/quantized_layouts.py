"""Writers of quantized checkpoints: each layout bit by bit from its description.

Nothing of tokenmill is imported: what they write is an oracle for tests, and the same whichever version reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Writer = Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]
"""(rng, out_size, in_size) -> the tensors of a module by suffix, and the weight that they mean."""

GROUP = 16


def words(fields: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] small unsigned integers -> [n, m * bits / 32] int32, written one field at a time."""
    per_word = 32 // bits
    packed = np.zeros((fields.shape[0], fields.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        source = place if order is None else order[place]
        packed |= fields[:, source::per_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32))


def meaning(values: np.ndarray, zeros: np.ndarray, scales: torch.Tensor, groups: np.ndarray) -> torch.Tensor:
    """(value - zero of its group) * scale of its group, one weight at a time."""
    weight = torch.zeros(values.shape)
    for i in range(values.shape[0]):
        for k in range(values.shape[1]):
            g = groups[k]
            weight[i, k] = (int(values[i, k]) - int(zeros[i, g])) * scales[i, g].item()
    return weight


def drawn(
    rng: np.random.Generator, out_size: int, in_size: int, bits: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    values = rng.integers(0, 1 << bits, (out_size, in_size))
    zeros = rng.integers(1, 1 << bits, (out_size, in_size // GROUP))
    scales = torch.from_numpy(rng.uniform(0.01, 0.02, zeros.shape)).half()
    return values, zeros, scales


def gptq(bits: int, shift: int, scattered: bool = False) -> Writer:
    def write(rng: np.random.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        values, zeros, scales = drawn(rng, out_size, in_size, bits)
        groups = np.arange(in_size) // GROUP
        if scattered:
            rng.shuffle(groups)
        tensors = {
            "qweight": words(values, bits).t().contiguous(),
            "qzeros": words((zeros - shift).T, bits),
            "scales": scales.t().contiguous(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, meaning(values, zeros, scales, groups)

    return write


def awq(rng: np.random.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
    values, zeros, scales = drawn(rng, out_size, in_size, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(values.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": scales.t().contiguous(),
    }
    return tensors, meaning(values, zeros, scales, np.arange(in_size) // GROUP)


def packed(bits: int, symmetric: bool) -> Writer:
    def write(rng: np.random.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        values, zeros, scales = drawn(rng, out_size, in_size, bits)
        tensors = {
            "weight_packed": words(values, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([out_size, in_size]),
        }
        if symmetric:
            zeros = np.full_like(zeros, 1 << (bits - 1))
        else:
            tensors["weight_zero_point"] = words(zeros.T, bits).t().contiguous()
        return tensors, meaning(values, zeros, scales, np.arange(in_size) // GROUP)

    return write


def int8(rng: np.random.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
    values = rng.integers(-128, 128, (out_size, in_size))
    scales = torch.from_numpy(rng.uniform(0.001, 0.002, (out_size, 1))).bfloat16()
    tensors = {"weight": torch.from_numpy(values.astype(np.int8)), "weight_scale": scales}
    return tensors, meaning(values, np.zeros((out_size, 1)), scales, np.zeros(in_size, dtype=int))


def compressed(bits: int, form: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq(4, 1)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, gptq(8, 1)),
    "gptq scattered": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq(4, 1, True)),
    "gptq format 2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        gptq(4, 0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "packed 4": (compressed(4, "pack-quantized"), packed(4, symmetric=True)),
    "packed 4 asymmetric": (compressed(4, "pack-quantized", symmetric=False), packed(4, symmetric=False)),
    "packed 8": (compressed(8, "pack-quantized"), packed(8, symmetric=True)),
    "int8": (compressed(8, "int-quantized", strategy="channel", group_size=None), int8),
}


def quantize(folder: Path, config: dict[str, Any], write: Writer, rng: np.random.Generator) -> Tensors:
    """Make every projection of a checkpoint quantized; returns what its parameters must become."""
    tensors, want = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        want[name] = tensors[name]
        if name.endswith("_proj.weight"):
            parts, want[name] = write(rng, *tensors.pop(name).shape)
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, config)
    return want


def change_config(folder: Path, quantization: Any) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
