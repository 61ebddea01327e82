"""The frequencies of the rotary position embedding (Su et al. 2021) and of its scaled forms, as tables made once."""

from __future__ import annotations

import math

import torch

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from tokenmill.model.kernels.heads import RotaryTables


def all_rotary_tables(architecture: Architecture, like: torch.Tensor) -> dict[RopeSpec, RotaryTables]:
    """Make the tables of every kind of rope that a layer has, each once; see `rotary_tables`."""
    ropes = {attention.rope: attention.head_dim for attention in architecture.attentions}
    return {
        rope: rotary_tables(rope, head_dim, architecture.max_position, like)
        for rope, head_dim in ropes.items()
        if rope is not None
    }


def rotary_tables(spec: RopeSpec, head_dim: int, max_position: int, like: torch.Tensor) -> RotaryTables:
    """Make tables for all positions, computed in float32 on the CPU, then moved to the dtype and device of `like`."""
    if like.is_meta:  # sizes are wanted, and millions of positions take long
        empty = like.new_empty(max_position, head_dim // 2)
        return RotaryTables(empty, empty)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(spec, head_dim))
    factor = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling | LongRopeScaling) else 1.0
    cos, sin, rotated = angles.cos(), angles.sin_(), spec.num_rotated(head_dim) // 2
    cos[:, :rotated] *= factor
    sin[:, :rotated] *= factor
    return RotaryTables(cos.to(like), sin.to(like))


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the frequencies, [head_dim / 2] float32, in radians per position; 0 behind those that turn."""
    turning = _turning(spec, spec.num_rotated(head_dim))
    return torch.nn.functional.pad(turning, (0, head_dim // 2 - len(turning)))


def rotated_order(spec: RopeSpec, head_dim: int) -> list[int]:
    """Return the order of a head's numbers in memory if a checkpoint turns only the first; empty: as they are.

    Kernels turn number i with number i + head_dim / 2; those that stay have frequency 0. No score depends on the order.
    """
    half, rest = spec.num_rotated(head_dim) // 2, (head_dim - spec.num_rotated(head_dim)) // 2
    if not rest:
        return []
    first, second, still = range(half), range(half, 2 * half), range(2 * half, head_dim)
    return [*first, *still[:rest], *second, *still[rest:]]


def _turning(spec: RopeSpec, size: int) -> torch.Tensor:
    """Return the frequencies of a head of which `size` numbers turn, [size / 2]."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    plain = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, spec.theta, size, scaling)
        case ProportionalScaling(share, factor):
            stays = torch.arange(size // 2) >= int(share * size // 2)
            return (plain / factor).masked_fill_(stays, 0.0)
        case LongRopeScaling() as scaling:
            return plain / torch.tensor(scaling.factors)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow long wavelengths by the factor, keep short ones, and blend between them (Llama 3.1, section 3.4)."""
    original, low, high = scaling.original_max_position, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slowed = plain / scaling.factor
    # 0 at the long end of the ramp (wavelength original / low), 1 at its short end (original / high).
    kept = (original / wavelengths - low) / (high - low)
    blend = (1 - kept) * slowed + kept * plain
    result = torch.where(wavelengths > original / low, slowed, blend)
    return torch.where(wavelengths < original / high, plain, result)


def _yarn(plain: torch.Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> torch.Tensor:
    """Keep dimensions that turn often, and slow those that turn seldom (YaRN, section 3.2)."""

    def dimension_of(rotations: float) -> float:
        """Return the dimension that makes this many rotations over the original context."""
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A ramp of no length would divide by zero.
    width = high - low if high != low else 0.001
    slowed_share = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * slowed_share + plain * (1 - slowed_share)
