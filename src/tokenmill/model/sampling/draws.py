"""The description of a draw: how one row comes to its token. Declared once, packed once a step, read by name.

A packed draw is a record of 8-byte fields. S of them are an array [S, NUM_FIELDS] of int64 on the host, or a tensor on
a device, where a captured graph may read them. The readers give the same tokens: `reference` (torch), `triton_draw` and
`native/isa/draw.cpp`. A new sampling parameter is a field here, a line in `describe`, and its meaning in each reader.

The randomness of a draw is in the record too: numbers keyed by (seed, position), so there is no generator to save,
share or replay. The hash is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
2014) with the finalizer of Stafford's variant 13, applied once per part of the key.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.core.sampling_params import MAX_INT, SamplingParams

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

# Below this the quotient of two logits' difference and the temperature overflows float32; no logits are that close.
MIN_TEMPERATURE = 1e-6
# In place of a token: a logit of the row is NaN or infinite, or all are -inf.
NO_TOKEN = -1

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)
# Of the numbers that are keyed by (seed, position, stream): a row's draw, and its redraw for the same position.
_STREAMS = np.arange(2, dtype=np.uint64)

PackedDraws = npt.NDArray[np.int64]


class Kind(IntEnum):
    """The tokens that a draw chooses from."""

    GREEDY = 0  # the largest logit; of equal ones the lowest id
    UNFILTERED = 1  # the whole vocabulary, in the order of the ids
    FILTERED = 2  # what min-p, top-k and top-p leave, larger logit first, equal ones by id


class Draw(NamedTuple):
    """The fields of a packed draw and their neutral values.

    Attributes:
        row, position: of the tables; the sampled token takes this position in its sequence.
        kind: a `Kind`.
        top_k: `MAX_INT` where it is off.
        uniform, redraw: the numbers in [0, 1) of the row's draw, and of another one where a mask refuses its token.
    """

    row: int = 0
    position: int = 1
    kind: int = Kind.GREEDY
    top_k: int = MAX_INT
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    redraw: float = 0.0


RECORD = np.dtype(
    [(name, np.float64 if isinstance(neutral, float) else np.int64) for name, neutral in Draw()._asdict().items()]
)
NUM_FIELDS = len(Draw._fields)


def describe(params: SamplingParams, vocab_size: int) -> Draw:
    """Return the fields that all draws of a request share."""
    draw = Draw(
        top_k=params.top_k if 0 < params.top_k < vocab_size else MAX_INT,
        temperature=max(params.temperature, MIN_TEMPERATURE),
        top_p=params.top_p,
        min_p=params.min_p,
    )
    if params.is_greedy:
        return draw
    is_neutral = draw._replace(temperature=1.0) == Draw()
    return draw._replace(kind=Kind.UNFILTERED if is_neutral else Kind.FILTERED)


def pack(records: npt.NDArray[np.void]) -> PackedDraws:
    """Return [S] of `RECORD` as [S, NUM_FIELDS] int64 in the same memory."""
    return records.view(np.int64).reshape(-1, NUM_FIELDS)


def column(draws: Array, name: str) -> Array:
    """Return one field of packed draws [S, NUM_FIELDS]: [S] int64, a view; of a float its bits."""
    return draws[:, Draw._fields.index(name)]


def redraws(draws: Array, rows: Array) -> Array:
    """Return some of the draws, [n] int64, for the same positions, with the other number."""
    again = draws[rows]
    column(again, "uniform")[:] = column(again, "redraw")
    return again


def keys_of(seeds: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Return hashes of (seed, stream), [2, S]: for `uniform` and for `redraw`.

    Args:
        seeds: [S], any integers of 64 bits; a negative seed is its two's complement.
    """
    # Hashing the seed first keeps neighbouring seeds from being shifted copies of one another's sequence.
    state = mix(seeds.astype(np.uint64) + _GAMMA)
    return mix(state + _STREAMS[:, None] * _GAMMA)


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits per key [..., S] and position [S]."""
    bits = mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> _UNUSED_BITS).astype(np.float64) * 2.0**-53


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finalizer, a bijection of 64-bit words: each bit in flips each bit out half of the time."""
    words = (words ^ (words >> _SHIFTS[0])) * _MULTIPLIERS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return words ^ (words >> _SHIFTS[2])
