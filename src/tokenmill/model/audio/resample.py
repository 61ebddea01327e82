"""Change the rate of samples by a polyphase filter: a sinc under a Kaiser window, as scipy's `resample_poly` has it.

Sums in float64 in a fixed order, without a library whose threads could change it: one file has one digest everywhere.
"""

from __future__ import annotations

from math import gcd

import numpy as np
import numpy.typing as npt

# Zero crossings on each side of the filter's middle, and the shape of its window.
_CROSSINGS, _BETA = 10, 5.0
# Samples that are made at once.
_BLOCK = 1 << 18

Samples = npt.NDArray[np.float32]


def resample(samples: Samples, rate: int, wanted: int) -> Samples:
    """Return samples at the wanted rate: ceil(n * wanted / rate) of them, the first at the same time."""
    up, down = wanted // gcd(rate, wanted), rate // gcd(rate, wanted)
    if up == down:
        return samples
    taps = _taps(up, down)
    half = len(taps) // 2
    count = -(-len(samples) * up // down)
    made = np.empty(count, dtype=np.float32)
    # Sample n of the result is the sum of taps[half + n * down - k * up] * samples[k]. Those whose n differ by `up`
    # have the same taps, and their samples lie `down` apart.
    longest = -(-len(taps) // up)
    padded = np.concatenate([np.zeros(longest), samples, np.zeros(longest + down)])
    for phase in range(min(up, count)):
        last, first_tap = divmod(half + phase * down, up)
        own = taps[first_tap::up]
        for begin in range(phase, count, _BLOCK * up):
            size = min(_BLOCK, -(-(count - begin) // up))
            place = longest + last + (begin - phase) // up * down
            total = np.zeros(size)
            for tap in own:
                total += tap * _every(padded, place, down, size)
                place -= 1
            made[begin : begin + size * up : up] = total
    return made


def _every(padded: npt.NDArray[np.float64], place: int, step: int, size: int) -> npt.NDArray[np.float64]:
    """Return samples `step` apart from a place on, 0 where there are none."""
    end = place + step * (size - 1) + 1
    if place >= 0 and end <= len(padded):
        return padded[place:end:step]
    places = place + step * np.arange(size)
    inside = (places >= 0) & (places < len(padded))
    return np.where(inside, padded[np.where(inside, places, 0)], 0.0)


def _taps(up: int, down: int) -> npt.NDArray[np.float64]:
    """Return the filter: odd in length, its sum `up`."""
    widest = max(up, down)
    half = _CROSSINGS * widest
    places = np.arange(-half, half + 1)
    taps = np.sinc(places / widest) / widest * np.kaiser(2 * half + 1, _BETA)
    return np.asarray(taps * (up / taps.sum()))
