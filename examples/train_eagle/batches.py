"""Dialogues side by side, and which of their tokens a head can learn to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from examples.train_eagle.features import Row
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a head drafts.

    Attributes:
        ids: [draft_vocab_size] int64, ascending. places: [vocab_size] int64, -1 for what is never drafted.
    """

    ids: Tensor
    places: Tensor

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int) -> Vocabulary:
        """Return a vocabulary of these ids."""
        places = torch.full((vocab_size,), -1)
        places[ids] = torch.arange(len(ids))
        return cls(ids, places)

    @classmethod
    def most_frequent(cls, tokens: Tensor, size: int, vocab_size: int) -> Vocabulary:
        """Return the vocabulary of the most frequent of some tokens; where counts are equal, of the lowest."""
        counts = torch.bincount(tokens, minlength=vocab_size)
        return cls.of(counts.sort(descending=True, stable=True).indices[:size].sort().values, vocab_size)

    def coverage(self, tokens: Tensor) -> float:
        """Return the share of some tokens that can be drafted."""
        return (self.places[tokens] >= 0).double().mean().item()


@dataclass(frozen=True)
class Batch:
    """Dialogues of at most T tokens, padded on the right.

    Attributes:
        ids: [B, T] int64. taps: [B, T, 3 * hidden_size]. final: [B, T, hidden_size].
        rows, columns: [N], places whose next token is part of an answer.
        best: [N], the next token that the model finds most likely there.
    """

    ids: Tensor
    taps: Tensor
    final: Tensor
    rows: Tensor
    columns: Tensor
    best: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        """Put dialogues side by side."""
        ids, is_answer, taps, final, best = (
            pad_sequence([getattr(row, name) for row in rows], batch_first=True)
            for name in ("ids", "is_answer", "taps", "final", "best")
        )
        before, places = is_answer[:, 1:].nonzero(as_tuple=True)
        return cls(ids, taps, final, before, places, best[before, places])

    def known_to(self, vocabulary: Vocabulary) -> Batch:
        """Return the batch with those places alone whose most likely next token can be drafted."""
        known = vocabulary.places[self.best] >= 0
        return Batch(self.ids, self.taps, self.final, self.rows[known], self.columns[known], self.best[known])

    def at_depth(self, hidden: Tensor, depth: int) -> Tensor:
        """Return the hidden states [N, hidden_size] that draft, at a depth, the tokens behind the places."""
        return hidden[self.rows, (self.columns - 1 - depth).clamp(min=0)]
