"""`allowed_token_ids` and `bad_words`: which tokens a row may take, whatever the model thinks of them.

One entry per row, always written whole, so that a reused row keeps nothing of its former owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenmill.sampling.allowed import WORD_BITS, AllowedTokens, ban_others
from tokenmill.scheduler.plan import NewRow

if TYPE_CHECKING:
    from tokenmill import _native

IntArray = npt.NDArray[np.integer]
# Stands before a bad word that is shorter than the longest.
_PADDING = -1


@dataclass(frozen=True, slots=True)
class BadWords:
    """The bad words of the rows of a step; m in all, the longest of 1 + L tokens.

    Attributes:
        indices: [m] int64, rows of the logits.
        table_rows, positions, first_output: [m] int64; the output so far lies between the last two.
        heads: [m, L] int64, all tokens of a word but the last, right-aligned.
        last: [m] int64, the token that would complete it.
    """

    indices: Tensor
    table_rows: Tensor
    positions: Tensor
    first_output: Tensor
    heads: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules of the rows of a step; None where no row has any."""

    allowed: AllowedTokens | None
    bad_words: BadWords | None


class TokenRuleTable:
    """The rules of every row."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._device = device
        self._allowed: list[npt.NDArray[np.int32] | None] = [None] * max_rows
        self._bad_words: list[tuple[tuple[int, ...], ...]] = [()] * max_rows
        self._first_output = np.zeros(max_rows, dtype=np.int64)

    def set(self, new_row: NewRow) -> bool:
        """Make `new_row.row` the row of this request; True if it has a rule."""
        params, row = new_row.params, new_row.row
        self._allowed[row] = self._bits(params.allowed_token_ids) if params.allowed_token_ids else None
        self._bad_words[row] = params.bad_word_ids
        self._first_output[row] = new_row.num_prompt_tokens
        return bool(params.allowed_token_ids or params.bad_word_ids)

    def select(self, rows: IntArray, positions: IntArray) -> TokenRules | None:
        """The rules of a step.

        Args:
            rows: [S] rows of the table, in the order of the logits.
            positions: [S] index in its sequence of the token each row samples.
        """
        owners = rows.tolist()
        limited = [index for index, row in enumerate(owners) if self._allowed[row] is not None]
        words = [(index, row, word) for index, row in enumerate(owners) for word in self._bad_words[row]]
        if not (limited or words):
            return None
        allowed = None
        if limited:
            bits = np.stack([bits for index in limited if (bits := self._allowed[owners[index]]) is not None])
            allowed = AllowedTokens(self._to_device(np.array(limited, dtype=np.int64)), self._to_device(bits))
        return TokenRules(allowed, self._words(words, positions) if words else None)

    def _words(self, words: list[tuple[int, int, tuple[int, ...]]], positions: IntArray) -> BadWords:
        longest = max(len(word) for _, _, word in words) - 1
        heads = np.full((len(words), longest), _PADDING, dtype=np.int64)
        for number, (_, _, word) in enumerate(words):
            heads[number, longest - len(word) + 1 :] = word[:-1]
        indices = np.array([index for index, _, _ in words], dtype=np.int64)
        table_rows = np.array([row for _, row, _ in words], dtype=np.int64)
        return BadWords(
            indices=self._to_device(indices),
            table_rows=self._to_device(table_rows),
            positions=self._to_device(positions[indices].astype(np.int64)),
            first_output=self._to_device(self._first_output[table_rows]),
            heads=self._to_device(heads),
            last=self._to_device(np.array([word[-1] for _, _, word in words], dtype=np.int64)),
        )

    def _bits(self, token_ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
        flags = np.zeros(self._num_words * WORD_BITS, dtype=np.uint8)
        flags[list(token_ids)] = 1
        return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)

    def _to_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, non_blocking=True)


def apply_rules(logits: Tensor, rules: TokenRules, token_table: Tensor, native: _native.Kernels | None = None) -> None:
    """Set the logits of tokens that a rule excludes to -inf, in place.

    Args:
        logits: [S, V] float32.
        token_table: [max_rows, max_len] integers, prompt and output ids of each row.
    """
    if rules.allowed is not None:
        ban_others(logits, rules.allowed, native)
    words = rules.bad_words
    if words is None:
        return
    # |<- prompt ->|<- output ... [head of a bad word] ->|<- position: its last token would come here
    places = words.positions[:, None] + torch.arange(-words.heads.shape[1], 0, device=logits.device)
    tokens = token_table[words.table_rows[:, None], places.clamp(min=0)]
    is_there = (tokens == words.heads) & (places >= words.first_output[:, None])
    completes = (is_there | (words.heads == _PADDING)).all(1)
    # Two words may end in the same token, of which only one is about to be completed: so add, do not assign.
    values = torch.where(completes, -torch.inf, 0.0).to(logits.dtype)
    logits.index_put_((words.indices, words.last), values, accumulate=True)
