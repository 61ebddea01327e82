"""Which tokens the grammar of each row allows next, and the one rule by which a row draws under them.

The rule, which depends on a row's parameters alone:

    greedy                  the largest of what the mask leaves
    top-k, top-p or min-p   one draw from what the mask leaves, for the filters would see other logits without it
    any other               an optimistic draw from the whole vocabulary with the first number of its key; if the mask
                            rejects that token, a redraw from what the mask leaves with the second

The last has the chances of one draw under the mask: p(t) + p(rejected) p(t) / p(allowed) = p(t) / p(allowed). It lets a
row do without its mask: whether the mask is there by then, is filled only now, or is never filled since the matcher has
said that the mask would have the token, the token is the same. A greedy row may go the same way.

Masks are filled beside the steps, each begun as soon as the token before it is known:

    set(row) ─> replay its output, fill its mask ─┐ (threads; llguidance gives up the interpreter lock)
    launch ─> forward ─> `ready` ─> sample ─> `take` the tokens ─> fill the next masks ...

One that is late does not hold up the batch: its row goes without a token in that step, and the scheduler runs it again.

Where the host itself runs the model there is no beside, and to ask a matcher about one token is several times cheaper
than a mask. So rows that may do without a mask have none there unless their token is rejected (as in llama.cpp), except
those that have just resumed or whose grammar has become slow:

    launch ─> forward ─> sample ─> `deciding` ─> redraw these rows ─> `take` the tokens ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.plan import AdmittedRequest
from tokenmill.sampling.bitmask import WORD_BITS, TokenBitmask
from tokenmill.sampling.row_grammar import SLOW_SECONDS, IntArray, MaskThreads, RowGrammar

# How long a step waits for masks after its forward pass, in seconds.
PATIENCE = 0.01


class GrammarStep:
    """The rows of one step that have a grammar, by their index among the rows that sample."""

    def __init__(
        self, rows: Sequence[tuple[int, RowGrammar]], late: Sequence[int], threads: MaskThreads, on_host: bool
    ) -> None:
        """`late`: rows that are steps ahead of their grammar, since it had no mask in time in a step before."""
        self._masked = [one for one in rows if one[1].has_mask]
        self._asked = [one for one in rows if not one[1].has_mask]
        self._late = late
        self._threads = threads
        self._on_host = on_host
        self._ready: Sequence[tuple[int, RowGrammar]] = []

    def ready(self, device: torch.device) -> TokenBitmask | None:
        """Masks for the rows that draw under them at once: those that are there now, or `PATIENCE` later.

        None if there are none.
        """
        # Many rows share a job, and to ask one takes a lock.
        jobs = {row.job for _, row in self._masked}
        done = {job for job in jobs if job.done()}
        if len(done) < len(jobs):
            done = wait(jobs, PATIENCE).done
        self._ready = self._masked if len(done) == len(jobs) else [one for one in self._masked if one[1].job in done]
        return _bitmask([one for one in self._ready if one[1].masks_first], device)

    def deciding(self, token_ids: torch.Tensor) -> TokenBitmask | None:
        """After `ready`: masks of rows that redraw where their mask rejects what they drew; None: no row.

        On the host these are the rows whose draw is rejected; elsewhere all that drew optimistically.

        Args:
            token_ids: [S] integers, what was sampled; negative where there was nothing to draw from.
        """
        if self._on_host:
            return _bitmask(self._rejected(token_ids.tolist()), token_ids.device)
        return _bitmask([one for one in self._ready if not one[1].masks_first], token_ids.device)

    def _rejected(self, tokens: Sequence[int]) -> list[tuple[int, RowGrammar]]:
        decided = [one for one in self._ready if not one[1].masks_first]
        if self._asked:
            asked = self._ask(tokens)
            self._ready = [*self._ready, *asked]
            decided += asked
        return [
            (index, row)
            for index, row in decided
            if tokens[index] >= 0 and not row.failure and not row.allows(tokens[index])
        ]

    def _ask(self, tokens: Sequence[int]) -> list[tuple[int, RowGrammar]]:
        """Let rows without a mask take in what they drew; those whose mask has been filled instead."""
        started = time.thread_time()
        drawn = [one for one in self._asked if tokens[one[0]] >= 0]
        filled = [(index, row) for index, row in drawn if not row.accepts(tokens[index])]
        if time.thread_time() - started > SLOW_SECONDS:
            for _, row in self._asked:
                row.is_slow = True
        return filled

    def take(self, token_ids: IntArray) -> dict[int, str]:
        """Take in what was sampled and begin the next masks.

        Args:
            token_ids: [S] int32, negative where a row could draw nothing; set to -1 where it goes without a token.

        Returns:
            Why a grammar cannot go on, by the index of its row.
        """
        tokens = token_ids.tolist()
        failures = {index: row.failure for index, row in self._ready if row.failure}
        sampled = [(index, row) for index, row in self._ready if index not in failures and tokens[index] >= 0]
        for index, row in sampled:
            row.take(tokens[index])
        without = {*self._late, *(index for index, _ in self._masked), *failures} - {index for index, _ in sampled}
        if without:
            token_ids[list(without)] = -1
        self._go_on([row for _, row in sampled])
        return failures

    def _go_on(self, sampled: Sequence[RowGrammar]) -> None:
        """See to the next token: of rows that have `sampled` with a mask, and of those whose matcher took theirs."""
        if not self._on_host:
            self._threads.begin(sampled)
            return
        accepted = [row for _, row in self._asked if not row.has_mask]
        slow = [row for row in (*sampled, *accepted) if row.is_slow]
        # The model takes all cores: a thread would get no time of its own, and handing it the work takes longer.
        for row in sampled:
            if not row.is_slow:
                row.follow() if row.goes_unmasked else row.advance()
        self._threads.begin(slow)


class GrammarRows:
    """The grammars of all rows.

    Args:
        template: gives the compiled grammar of a text.
        on_host: the model runs on the processors that masks are filled by.
    """

    def __init__(self, template: Callable[[str], Any | None], vocab_size: int, on_host: bool = False) -> None:
        self._template = template
        self._num_words = -(-vocab_size // WORD_BITS)
        self._on_host = on_host
        self._rows: dict[int, RowGrammar] = {}
        self._threads = MaskThreads()

    def set(self, new_rows: Iterable[AdmittedRequest]) -> None:
        """These requests have taken their rows; nothing is left of who had them before."""
        begun = []
        for new in new_rows:
            self._rows.pop(new.row, None)
            if new.params.grammar is not None:
                row = RowGrammar(self._template(new.params.grammar.text), new, self._num_words, self._on_host)
                self._rows[new.row] = row
                if row.has_mask:
                    begun.append(row)
        self._threads.begin(begun)

    def step(self, rows: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> GrammarStep | None:
        """The grammars among the rows that sample in a step; None if there are none.

        Args:
            rows, positions: [S] int32; the row of each, and the index in its sequence of the token it samples.
        """
        if not self._rows:
            return None
        due, late = [], []
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            grammar = self._rows.get(row)
            if grammar is not None and grammar.position == position:
                due.append((index, grammar))
            elif grammar is not None:
                late.append(index)
        return GrammarStep(due, late, self._threads, self._on_host) if due or late else None

    def concerns(self, rows: npt.NDArray[np.integer]) -> bool:
        """Whether any of these rows has a grammar."""
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def _bitmask(rows: Sequence[tuple[int, RowGrammar]], device: torch.device) -> TokenBitmask | None:
    usable = [(index, row.mask) for index, row in rows if not row.failure]
    if not usable:
        return None
    indices = np.array([index for index, _ in usable], dtype=np.int64)
    bits = usable[0][1] if len(usable) == 1 else np.concatenate([mask for _, mask in usable])
    return TokenBitmask(
        torch.from_numpy(indices).to(device), torch.from_numpy(bits.reshape(len(usable), -1)).to(device)
    )
