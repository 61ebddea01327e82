"""Turns of media in a text model's rotary embedding: by time, row and column, or as text turns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.media import MediaSpan

Positions = npt.NDArray[np.int64]


class MediaTurns(msgspec.Struct, frozen=True, kw_only=True):
    """Places of media in the text model's rotary embedding; by default those of text.

    Attributes:
        sections: frequencies that turn by time, row and column; (): all by the place in the prompt.
        is_interleaved: these take turns; else they follow each other.
        merge: patches of a grid in each direction that are one embedding.
    """

    sections: tuple[int, int, int] | tuple[()] = ()
    is_interleaved: bool = True
    merge: int = 1

    def axes(self, num_frequencies: int) -> npt.NDArray[np.int64]:
        """Return the axis that each frequency turns by; see `frequency_axes`."""
        if not self.sections:
            return np.zeros(num_frequencies, dtype=np.int64)
        return frequency_axes(self.sections, num_frequencies, self.is_interleaved)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> tuple[Positions, int]:
        """Return the positions of a prompt, and the shift of tokens behind it; see `prompt_positions`."""
        return prompt_positions(num_tokens, media if self.sections else (), self.merge)


TURNS_OF_TEXT = MediaTurns()


def prompt_positions(num_tokens: int, media: Sequence[MediaSpan], merge: int) -> tuple[Positions, int]:
    """Return positions [3, num_tokens] of a prompt, of time, row and column, and the shift of tokens behind it.

    Text goes on along all three axes at once. An image stands at one time, its embeddings at their rows and columns
    from there on, and the text behind it goes on behind its longer side (Qwen2-VL's rule, with time not in frames).
    Frames of a video whose times are positions stand at their own, all at rows and columns from where the video begins;
    text goes on behind the largest position of all (Qwen2.5-VL's rule as its makers and vLLM have it; transformers
    since 5.3 lets text go on behind the longer side, however long the video is).

    Args:
        media: in the order of their places, none over another.
        merge: patches of a grid in each direction that are one embedding.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done = shift = start = last = 0
    for span in media:
        positions[:, done : span.offset] = np.arange(done, span.offset) + shift
        rows, columns = span.rows // merge, span.columns // merge
        if not span.before:
            start = last = span.offset + shift
        positions[0, span.offset : span.end] = start + span.time
        positions[1, span.offset : span.end] = start + np.repeat(np.arange(rows), columns)
        positions[2, span.offset : span.end] = start + np.tile(np.arange(columns), rows)
        last = max(last, start + span.time, start + max(rows, columns) - 1)
        done, shift = span.end, last + 1 - span.end
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
