"""Measure the logits of a format against those of float32, position by position, as llama.cpp's perplexity does.

The text is cut into chunks. Of each, positions of the second half are scored: those of the first have little to go by.
The reference's log probabilities wait in a file, since all of them together may be larger than the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
# Rows that are looked at together.
_ROWS = 64
# Log probabilities below this add nothing that can be measured, and much noise.
_LEAST = -16.0


def scored_positions(context: int) -> range:
    """Return the positions of a chunk whose logits are scored; each tells of the next token."""
    return range(context // 2, context - 1)


class Score(msgspec.Struct, frozen=True):
    """The figures of one format on a text, position by position.

    Attributes:
        losses: [n], minus the log probability of each token that comes.
        divergences: [n], the Kullback-Leibler divergence from the reference to this format; empty: it is the reference.
        same_top: share of positions with the reference's most likely token.
    """

    losses: Floats
    divergences: Floats
    same_top: float

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss."""
        return math.exp(float(self.losses.mean()))

    def row(self, reference: Score) -> dict[str, float]:
        """Return the figures of a row of the table; those of the reference itself are exact."""
        is_reference = not len(self.divergences)
        return {
            "ppl": self.perplexity,
            "ppl_ratio": self.perplexity / reference.perplexity,
            "kl_mean": 0.0 if is_reference else float(self.divergences.mean()),
            "kl_p99": 0.0 if is_reference else float(np.percentile(self.divergences, 99)),
            "same_top": self.same_top,
        }


class Scorer:
    """Takes in the logits of chunk after chunk, in pieces as they come.

    Args:
        chunks: [chunks, context] token ids.
        store: file with the reference's log probabilities, [scored, vocabulary] float32; it is written by the
            reference, which has `is_reference`, and read by all others.
    """

    def __init__(self, chunks: Sequence[Sequence[int]], vocab_size: int, store: Path, is_reference: bool) -> None:
        self._chunks = chunks
        self._positions = scored_positions(len(chunks[0]))
        shape = (len(chunks) * len(self._positions), vocab_size)
        self._is_reference = is_reference
        self._store = np.memmap(store, np.float32, "w+" if is_reference else "r", shape=shape)
        self._losses = np.zeros(shape[0])
        self._divergences = np.zeros(0 if is_reference else shape[0])
        self._num_same = 0
        self._chunk = self._position = 0

    def begin_chunk(self, chunk: int, position: int = 0) -> None:
        """Begin a chunk: logits that come are those of its positions, from `position` on."""
        self._chunk, self._position = chunk, position

    def add_logits(self, logits: Floats) -> None:
        """Take in the logits of the next positions, [n, vocabulary]."""
        start, end = self._position, self._position + len(logits)
        self._position = end
        for first in range(max(start, self._positions.start), min(end, self._positions.stop), _ROWS):
            last = min(first + _ROWS, end, self._positions.stop)
            self._score(first, logits[first - start : last - start])

    def score(self) -> Score:
        """Return the score of all chunks."""
        same = 1.0 if self._is_reference else self._num_same / len(self._losses)
        return Score(self._losses, self._divergences, same)

    def _score(self, position: int, logits: Floats) -> None:
        count, begin = len(logits), self._chunk * len(self._positions) + position - self._positions.start
        logs = _log_softmax(logits)
        coming = np.asarray(self._chunks[self._chunk][position + 1 : position + 1 + count])
        self._losses[begin : begin + count] = -logs[np.arange(count), coming]
        if self._is_reference:
            self._store[begin : begin + count] = logs
            return
        wanted = self._store[begin : begin + count]
        terms = np.where(wanted > _LEAST, np.exp(wanted) * (wanted - logs), 0)
        self._divergences[begin : begin + count] = terms.sum(1, dtype=np.float64)
        self._num_same += int((wanted.argmax(1) == logs.argmax(1)).sum())


def _log_softmax(logits: Floats) -> npt.NDArray[np.float32]:
    shifted: npt.NDArray[np.float32] = np.asarray(logits, np.float32) - logits.max(1, keepdims=True)
    totals = np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)
    shifted -= np.log(totals).astype(np.float32)
    return shifted
