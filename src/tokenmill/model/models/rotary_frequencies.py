"""The frequencies of the rotary position embedding (Su et al. 2021) and of its scaled forms, in float32.

Powers are taken in float64 and rounded once, everything else is float32 arithmetic of single numbers: the same bits on
every machine. Knows no torch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tokenmill.model.architecture.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)

Floats = npt.NDArray[np.float32]


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Floats:
    """Return the frequencies, [head_dim / 2] float32, in radians per position; 0 behind those that turn."""
    turning = _turning(spec, spec.num_rotated(head_dim))
    return np.pad(turning, (0, head_dim // 2 - len(turning)))


def _turning(spec: RopeSpec, size: int) -> Floats:
    """Return the frequencies of a head of which `size` numbers turn, [size / 2]."""
    plain = _plain(spec.theta, size)
    match spec.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / np.float32(factor)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, spec.theta, size, scaling)
        case ProportionalScaling(share, factor):
            turns = np.arange(size // 2) < int(share * size // 2)
            return plain / np.float32(factor) * turns.astype(np.float32)
        case LongRopeScaling() as scaling:
            factors: Floats = np.array(scaling.factors, dtype=np.float32)
            return plain / factors


def _plain(theta: float, size: int) -> Floats:
    exponents, base = np.arange(0, size, 2, dtype=np.float32) / np.float32(size), float(np.float32(theta))
    powers = np.array([math.pow(base, exponent) for exponent in exponents.tolist()], dtype=np.float32)
    return np.float32(1) / powers


def _llama3(plain: Floats, scaling: Llama3Scaling) -> Floats:
    """Slow long wavelengths by the factor, keep short ones, and blend between them (Llama 3.1, section 3.4)."""
    original, low, high = map(
        np.float32, (scaling.original_max_position, scaling.low_freq_factor, scaling.high_freq_factor)
    )
    wavelengths = np.float32(2 * math.pi) / plain
    slowed = plain / np.float32(scaling.factor)
    # 0 at the long end of the ramp (wavelength original / low), 1 at its short end (original / high).
    kept = (original / wavelengths - low) / (high - low)
    blend = (np.float32(1) - kept) * slowed + kept * plain
    result = np.where(wavelengths > original / low, slowed, blend)
    return np.where(wavelengths < original / high, plain, result)


def _yarn(plain: Floats, theta: float, head_dim: int, scaling: YarnScaling) -> Floats:
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
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    slowed_share = ramp.clip(0, 1)
    return plain / np.float32(scaling.factor) * slowed_share + plain * (np.float32(1) - slowed_share)
