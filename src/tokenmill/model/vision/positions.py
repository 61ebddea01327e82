"""The positions of tokens in a prompt with images: three each, of time, row and column.

Text goes on along all three axes at once. An image stands at one time, its embeddings at their rows and columns from
there on, and the text behind it goes on behind its longer side (Qwen2-VL's rule, with time not counted in frames).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.core.media import MediaSpan

Positions = npt.NDArray[np.int64]


def prompt_positions(num_tokens: int, media: Sequence[MediaSpan], merge: int) -> tuple[Positions, int]:
    """Return positions [3, num_tokens] of a prompt, and the shift for the place of a token behind it.

    Args:
        media: in the order of their places, none over another.
        merge: patches of a grid in each direction that are one embedding.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done = shift = 0
    for span in media:
        positions[:, done : span.offset] = np.arange(done, span.offset) + shift
        start, rows, columns = span.offset + shift, span.rows // merge, span.columns // merge
        positions[0, span.offset : span.end] = start
        positions[1, span.offset : span.end] = start + np.repeat(np.arange(rows), columns)
        positions[2, span.offset : span.end] = start + np.tile(np.arange(columns), rows)
        done, shift = span.end, shift + max(rows, columns) - span.length
    positions[:, done:] = np.arange(done, num_tokens) + shift
    return positions, shift


def frequency_axes(
    sections: tuple[int, int, int], num_frequencies: int, is_interleaved: bool = True
) -> npt.NDArray[np.int64]:
    """Return [num_frequencies], the axis that each frequency of the rotary embedding turns by: 0 time, 1 row, 2 column.

    Interleaved, every axis has fast and slow ones, and what sections leave over is time's. Else they follow each other.
    """
    if not is_interleaved:
        return np.repeat(np.arange(3), sections)
    index = np.arange(num_frequencies)
    axes = np.zeros(num_frequencies, dtype=np.int64)
    for axis in (1, 2):
        axes[(index % 3 == axis) & (index < 3 * sections[axis])] = axis
    return axes
