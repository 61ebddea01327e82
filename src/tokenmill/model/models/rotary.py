"""The tables of the rotary position embedding, made once, in the form of the model's kernels."""

from __future__ import annotations

import numpy as np

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.rope_spec import LongRopeScaling, RopeSpec, YarnScaling
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.kernels.rotary_angles import cos_and_sin
from tokenmill.model.models.rotary_frequencies import inverse_frequencies
from tokenmill.platform.memory import usable_cores


def all_rotary_tables(architecture: Architecture, kernels: Kernels) -> dict[RopeSpec, RotaryTables]:
    """Make the tables of every kind of rope that a layer has, each once; see `rotary_tables`."""
    ropes = {attention.rope: attention.head_dim for attention in architecture.attentions}
    return {
        rope: rotary_tables(rope, head_dim, architecture.max_position, kernels)
        for rope, head_dim in ropes.items()
        if rope is not None
    }


def rotary_tables(spec: RopeSpec, head_dim: int, max_position: int, kernels: Kernels) -> RotaryTables:
    """Make tables for all positions, computed on the CPU, then brought to the kernels' dtype and device."""
    if not kernels.has_memory:  # sizes are wanted, and millions of positions take long
        size = head_dim // 2
        empty = kernels.without_memory().vector(max_position * size).reshape(max_position, size)
        return RotaryTables(empty, empty)
    frequencies, rotated = inverse_frequencies(spec, head_dim), spec.num_rotated(head_dim) // 2
    native = getattr(kernels, "native", None) or load_kernels(usable_cores())
    cos, sin = cos_and_sin(frequencies, max_position, native)
    if isinstance(spec.scaling, YarnScaling | LongRopeScaling):
        factor = np.float32(spec.scaling.attention_factor)
        cos[:, :rotated] *= factor
        sin[:, :rotated] *= factor
    return RotaryTables(kernels.constant(cos), kernels.constant(sin))


def rotated_order(spec: RopeSpec, head_dim: int) -> list[int]:
    """Return the order of a head's numbers in memory if a checkpoint turns only the first; empty: as they are.

    Kernels turn number i with number i + head_dim / 2; those that stay have frequency 0. No score depends on the order.
    """
    half, rest = spec.num_rotated(head_dim) // 2, (head_dim - spec.num_rotated(head_dim)) // 2
    if not rest:
        return []
    first, second, still = range(half), range(half, 2 * half), range(2 * half, head_dim)
    return [*first, *still[:rest], *second, *still[rest:]]
