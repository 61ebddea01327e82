"""Uniform numbers keyed by (seed, position, stream): no generator, no state, so nothing to save, share or replay.

The hash is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) with the
finalizer of Stafford's variant 13, applied once per part of the key. Knows nothing of requests or devices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
FloatArray = npt.NDArray[np.float64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)


def uniforms(seeds: npt.NDArray[np.integer], positions: npt.NDArray[np.integer], stream: int = 0) -> FloatArray:
    """One number in [0, 1) per (seed, position), [S] float64 with 53 random bits.

    Args:
        seeds: [S], any integers of 64 bits; a negative seed is its two's complement.
        positions: [S], index in the sequence of the token that is drawn.
        stream: tells apart several draws for one position.
    """
    state = mix(seeds.astype(np.uint64) + _GAMMA)
    state = mix(state + np.uint64(stream) * _GAMMA)
    # Hashing the seed first keeps neighbouring seeds from being shifted copies of one another's sequence.
    bits = mix(state + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> _UNUSED_BITS).astype(np.float64) * 2.0**-53


def mix(words: UInt64Array) -> UInt64Array:
    """SplitMix64's finalizer: a bijection of 64-bit words in which each bit in flips each bit out half of the time."""
    words = (words ^ (words >> _SHIFTS[0])) * _MULTIPLIERS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return words ^ (words >> _SHIFTS[2])
