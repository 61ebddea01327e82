"""Follow the thinking of one row by its tokens, and say which token must come next once its budget is used up.

    outside ─ begin mark ─> thinking, each token counts ─ budget used up ─> forced: message and end mark ─> outside
                                 └─ end mark ─> outside

The state follows from the tokens of the output alone, whichever steps or rows they came by. So a preempted request goes
on within its forced tokens, and drafts are looked at as if they had come. Thinking that begins again counts on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from tokenmill.core.sampling_params import ThinkingBudget


class Thoughts:
    """The thinking of one row so far.

    Attributes:
        num_tokens: tokens of thinking, without its marks and what was forced.
    """

    def __init__(self, budget: ThinkingBudget, output: Iterable[int] = ()) -> None:
        self._budget = budget
        self._longest = max(len(budget.begin), len(budget.end))
        self._is_thinking = budget.has_begun
        self._tail: list[int] = []
        self._num_forced = 0
        self.num_tokens = 0
        for token_id in output:
            self.add_token(token_id)

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that must come next; empty: any may."""
        is_over = self._is_thinking and self.num_tokens >= self._budget.most
        return self._budget.forced[self._num_forced :] if is_over else ()

    def refuses(self, token_id: int) -> bool:
        """Return True if another token must come next."""
        return bool(self.forced) and token_id != self.forced[0]

    def add_token(self, token_id: int) -> None:
        """Take in the next token of the output."""
        budget = self._budget
        self._tail = [*self._tail, token_id][-self._longest :]
        if not self._is_thinking:
            if self._ends_with(budget.begin):
                self._is_thinking, self._num_forced, self._tail = True, 0, []
            return
        if forced := self.forced:
            # Another one came before the budget was cut, in the life of the request before this row.
            self._num_forced = self._num_forced + 1 if token_id == forced[0] else int(token_id == budget.forced[0])
            if self._num_forced == len(budget.forced) or self._ends_with(budget.end):
                self._is_thinking, self._tail = False, []
            return
        self.num_tokens += 1
        if self._ends_with(budget.end):
            self.num_tokens -= len(budget.end)
            self._is_thinking, self._tail = False, []
        elif self.num_tokens == len(budget.begin) and self._ends_with(budget.begin):
            self.num_tokens = 0  # an answer may repeat the mark of its prompt

    def after(self, token_ids: Iterable[int]) -> Self:
        """Return the state behind further tokens; this one stays as it is."""
        copy = type(self)(self._budget)
        copy._is_thinking, copy._tail = self._is_thinking, self._tail
        copy._num_forced, copy.num_tokens = self._num_forced, self.num_tokens
        for token_id in token_ids:
            copy.add_token(token_id)
        return copy

    def _ends_with(self, mark: Sequence[int]) -> bool:
        return self._tail[-len(mark) :] == list(mark)
