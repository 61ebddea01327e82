"""The tables of the rotary position embedding, made once, as tensors of the model."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.rope_spec import LongRopeScaling, RopeSpec, YarnScaling
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.rotary_angles import cos_and_sin
from tokenmill.model.models.rotary_frequencies import inverse_frequencies


def all_rotary_tables(architecture: Architecture, like: torch.Tensor) -> dict[RopeSpec, RotaryTables]:
    """Make the tables of every kind of rope that a layer has, each once; see `rotary_tables`."""
    ropes = {attention.rope: attention.head_dim for attention in architecture.attentions}
    return {
        rope: rotary_tables(rope, head_dim, architecture.max_position, like)
        for rope, head_dim in ropes.items()
        if rope is not None
    }


def rotary_tables(spec: RopeSpec, head_dim: int, max_position: int, like: torch.Tensor) -> RotaryTables:
    """Make tables for all positions, computed on the CPU, then moved to the dtype and device of `like`."""
    if like.is_meta:  # sizes are wanted, and millions of positions take long
        empty = like.new_empty(max_position, head_dim // 2)
        return RotaryTables(empty, empty)
    frequencies, rotated = inverse_frequencies(spec, head_dim), spec.num_rotated(head_dim) // 2
    cos, sin = cos_and_sin(frequencies, max_position, load_kernels(torch.get_num_threads()))
    if isinstance(spec.scaling, YarnScaling | LongRopeScaling):
        factor = np.float32(spec.scaling.attention_factor)
        cos[:, :rotated] *= factor
        sin[:, :rotated] *= factor
    return RotaryTables(torch.from_numpy(cos).to(like), torch.from_numpy(sin).to(like))


def rotated_order(spec: RopeSpec, head_dim: int) -> list[int]:
    """Return the order of a head's numbers in memory if a checkpoint turns only the first; empty: as they are.

    Kernels turn number i with number i + head_dim / 2; those that stay have frequency 0. No score depends on the order.
    """
    half, rest = spec.num_rotated(head_dim) // 2, (head_dim - spec.num_rotated(head_dim)) // 2
    if not rest:
        return []
    first, second, still = range(half), range(half, 2 * half), range(2 * half, head_dim)
    return [*first, *still[:rest], *second, *still[rest:]]
