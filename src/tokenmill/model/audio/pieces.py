"""Cut long sound where it is quietest, and write samples as a file again."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from tokenmill.model.audio.resample import Samples
from tokenmill.model.audio.spec import RATE

# A pause is looked for in the last second of a piece, by the energy of a tenth of a second.
_LAST, _PAUSE = RATE, RATE // 10
# The shortest end that is a piece of its own; a shorter one has nothing to be heard.
_SHORTEST = RATE // 10
_FLOAT = 3  # WAVE_FORMAT_IEEE_FLOAT


def pieces(samples: Samples, most: int) -> Iterator[Samples]:
    """Cut samples into pieces of at most `most`, each at the quietest place of its last second; nothing is left out."""
    start = 0
    while len(samples) - start > most:
        end = start + most - _LAST
        end += _quietest(samples[end : end + _LAST])
        yield samples[start:end]
        start = end
    if len(samples) - start >= _SHORTEST or not start:
        yield samples[start:]


def _quietest(samples: Samples) -> int:
    """Return the middle of the tenth of a second with the least energy."""
    sums = np.concatenate([[0.0], np.cumsum(samples.astype(np.float64) ** 2)])
    return int(np.argmin(sums[_PAUSE:] - sums[:-_PAUSE])) + _PAUSE // 2


def wav_file(samples: Samples, rate: int = RATE) -> bytes:
    """Return mono samples as a WAV file that loses nothing of them."""
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, _FLOAT, 1, rate, 4 * rate, 4, 32)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body
