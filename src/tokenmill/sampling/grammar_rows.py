"""Which tokens the grammar of each row allows next.

Masks are filled beside the steps, each begun as soon as the token before it is known:

    set(row) ─> replay its output, fill its mask ─┐ (threads; llguidance gives up the interpreter lock)
    launch ─> forward ─> `ready` ─> sample ─> `take` the tokens ─> fill the next masks ...

One that is late does not hold up the batch: its row goes without a token in that step, and the scheduler runs it again.

Where the host itself runs the model there is no beside, and to ask a grammar about one token is several times cheaper
than a mask. So a row there draws first, from the whole vocabulary, and only if its grammar refuses the token does it
draw again among those that the mask leaves (as in llama.cpp):

    launch ─> forward ─> sample ─> `refused` ─> sample these rows again ─> `take` the tokens ...

A greedy row gets the token that it would have had with the mask at once, and one that draws from all tokens has the
same chances: p(t) + p(refused) p(t) / p(allowed) = p(t) / p(allowed). Top-k, top-p and min-p would see other logits, so
rows with these keep their masks, which also leave them less to sort. So do rows whose grammar has become slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.sampling.allowed import WORD_BITS, AllowedTokens
from tokenmill.sampling.row_grammar import SLOW_SECONDS, IntArray, MaskThreads, RowGrammar
from tokenmill.scheduler.plan import NewRow

# How long a step waits for masks after its forward pass, in seconds.
PATIENCE = 0.01


class GrammarStep:
    """The rows of one step that have a grammar, by their index among the rows that sample."""

    def __init__(
        self, rows: Sequence[tuple[int, RowGrammar]], late: Sequence[int], threads: MaskThreads, on_host: bool
    ) -> None:
        """`late`: rows that are steps ahead of their grammar, since it had no mask in time in a step before."""
        self._masked = [one for one in rows if not one[1].draws_first]
        self._open = [one for one in rows if one[1].draws_first]
        self._late = late
        self._threads = threads
        self._on_host = on_host
        self._ready: Sequence[tuple[int, RowGrammar]] = []

    def ready(self, device: torch.device) -> AllowedTokens | None:
        """The masks that are there now, or `PATIENCE` later; None if none is."""
        # Many rows share a job, and to ask one takes a lock.
        jobs = {row.job for _, row in self._masked}
        done = {job for job in jobs if job.done()}
        if len(done) < len(jobs):
            done = wait(jobs, PATIENCE).done
        self._ready = self._masked if len(done) == len(jobs) else [one for one in self._masked if one[1].job in done]
        return _allowed(self._ready, device)

    def refused(self, token_ids: IntArray) -> AllowedTokens | None:
        """What the grammars leave to those rows that drew first and have to draw again; None if there are none.

        Args:
            token_ids: [S] integers, what was sampled.
        """
        if not self._open:
            return None
        started, tokens = time.thread_time(), token_ids.tolist()
        refused = [(index, row) for index, row in self._open if not row.accepts(tokens[index])]
        if time.thread_time() - started > SLOW_SECONDS:
            for _, row in self._open:
                row.is_slow = True
        self._ready = [*self._ready, *refused]
        return _allowed(refused, torch.device("cpu"))

    def take(self, token_ids: IntArray) -> dict[int, str]:
        """Take in what was sampled and begin the next masks.

        Args:
            token_ids: [S] int32; set to -1 where a row goes without a token.

        Returns:
            Why a row cannot go on, by its index.
        """
        failures = {index: row.failure for index, row in self._ready if row.failure}
        sampled = [one for one in self._ready if one[0] not in failures] if failures else self._ready
        for index, row in sampled:
            row.take(int(token_ids[index]))
        without = {*self._late, *(index for index, _ in self._masked), *failures} - {index for index, _ in sampled}
        if without:
            token_ids[list(without)] = -1
        self._go_on([row for _, row in sampled])
        return failures

    def _go_on(self, sampled: Sequence[RowGrammar]) -> None:
        """See to the next token: of rows that have `sampled` with a mask, and of those that drew first."""
        if not self._on_host:
            self._threads.begin(sampled)
            return
        accepted = [row for _, row in self._open if row.draws_first]
        slow = [row for row in (*sampled, *accepted) if row.is_slow]
        # The model takes all cores: a thread would get no time of its own, and handing it the work takes longer.
        for row in sampled:
            if not row.is_slow:
                row.follow() if row.may_draw_first else row.advance()
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

    def set(self, new_rows: Iterable[NewRow]) -> None:
        """These requests have taken their rows; nothing is left of who had them before."""
        begun = []
        for new in new_rows:
            self._rows.pop(new.row, None)
            if new.params.grammar is not None:
                row = RowGrammar(self._template(new.params.grammar.text), new, self._num_words, self._on_host)
                self._rows[new.row] = row
                if not row.draws_first:
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


def _allowed(rows: Sequence[tuple[int, RowGrammar]], device: torch.device) -> AllowedTokens | None:
    usable = [(index, row.mask) for index, row in rows if not row.failure]
    if not usable:
        return None
    indices = np.array([index for index, _ in usable], dtype=np.int64)
    bits = usable[0][1] if len(usable) == 1 else np.concatenate([mask for _, mask in usable])
    return AllowedTokens(
        torch.from_numpy(indices).to(device), torch.from_numpy(bits.reshape(len(usable), -1)).to(device)
    )
