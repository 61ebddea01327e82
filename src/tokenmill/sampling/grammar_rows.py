"""Which tokens the grammar of each row allows next, computed beside the steps.

    set(row) ─> replay its output, fill its mask ─┐ (threads; llguidance gives up the interpreter lock)
    launch ─> forward ─> `ready` ─> sample ─> `take` the tokens ─> fill the next masks ...

A mask is begun as soon as the token before it is known, so it is there when the next step wants it. One that is late
does not hold up the batch: its row goes without a token in that step, and the scheduler runs it again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.sampling.allowed import WORD_BITS, AllowedTokens
from tokenmill.scheduler.plan import NewRow
from tokenmill.structured.compiler import explain

logger = logging.getLogger(__name__)

# How long a step waits for masks after its forward pass, in seconds.
PATIENCE = 0.01
_MAX_THREADS = 4
# A row that once took more processor time than this for a mask gets a thread of its own from then on. All others share
# one: a mask takes microseconds, and to wake a thread takes many.
_SLOW_SECONDS = 0.002

IntArray = npt.NDArray[np.int32]


class RowGrammar:
    """The matcher of one row and its next mask. Between `begin` and the end of that job, the job owns both.

    Attributes:
        job: the work that fills the mask, queued or done.
        position: index in its sequence of the token that the mask is for.
        mask: [ceil(V / 32)] int32.
        is_slow: one of its masks took long.
        failure: why there is no mask, nor will be; "" while all is well.
    """

    def __init__(self, template: Any | None, new_row: NewRow, num_words: int) -> None:
        self.position = len(new_row.token_ids)
        self.mask: IntArray = np.zeros(num_words, dtype=np.int32)
        self.failure = "" if template is not None else "its grammar is gone"
        self._matcher = template.deep_copy() if template is not None else None
        self._taken: list[int] = new_row.token_ids[new_row.num_prompt_tokens :].tolist()
        self._first_stop_position = new_row.num_prompt_tokens + new_row.params.min_tokens
        self._stop_bits = _bits(new_row.stop_token_ids, num_words)
        self.job: Future[None] = Future()
        self.is_slow = False

    def take(self, token_id: int) -> None:
        """The row has sampled this token; the next job takes it in."""
        self._taken.append(token_id)
        self.position += 1

    def advance(self) -> None:
        """Take in the sampled tokens and fill the next mask."""
        matcher, taken = self._matcher, self._taken
        self._taken = []
        if matcher is None or self.failure:
            return
        try:
            if not taken or matcher.consume_tokens(taken):
                matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        except Exception:  # whatever llguidance meets concerns this row alone
            logger.exception("a grammar failed")
            self.failure = "its grammar failed"
            return
        if matcher.is_error():
            self.failure = f"its grammar cannot go on: {explain(matcher)}"
        elif self.position < self._first_stop_position:
            # Where the grammar leaves nothing but the end, the end it is.
            without_stops = self.mask & ~self._stop_bits
            if without_stops.any():
                self.mask[:] = without_stops


class GrammarStep:
    """The rows of one step that have a grammar, by their index among the rows that sample."""

    def __init__(
        self, rows: Sequence[tuple[int, RowGrammar]], late: Sequence[int], threads: ThreadPoolExecutor
    ) -> None:
        """`late`: rows that are steps ahead of their grammar, since it had no mask in time in a step before."""
        self._rows = rows
        self._late = late
        self._threads = threads
        self._ready: list[tuple[int, RowGrammar]] = []

    def ready(self, device: torch.device) -> AllowedTokens | None:
        """The masks that are there now, or `PATIENCE` later; None if none is."""
        wait({row.job for _, row in self._rows}, PATIENCE)
        self._ready = [(index, row) for index, row in self._rows if row.job.done()]
        usable = [(index, row.mask) for index, row in self._ready if not row.failure]
        if not usable:
            return None
        indices = np.array([index for index, _ in usable], dtype=np.int64)
        bits = np.stack([mask for _, mask in usable])
        return AllowedTokens(torch.from_numpy(indices).to(device), torch.from_numpy(bits).to(device))

    def take(self, token_ids: IntArray) -> dict[int, str]:
        """Take in what was sampled and begin the next masks.

        Args:
            token_ids: [S] int32; set to -1 where a row goes without a token.

        Returns:
            Why a row cannot go on, by its index.
        """
        failures = {index: row.failure for index, row in self._ready if row.failure}
        sampled = [(index, row) for index, row in self._ready if not row.failure]
        for index, row in sampled:
            row.take(int(token_ids[index]))
        without = {*self._late, *(index for index, _ in self._rows)} - {index for index, _ in sampled}
        token_ids[list(without)] = -1
        if len(token_ids) == 1:
            # Nobody else would have to wait, so it is not worth waking a thread.
            for _, row in sampled:
                _advance_all([row])
        else:
            begin([row for _, row in sampled], self._threads)
        return failures


class GrammarRows:
    """The grammars of all rows.

    Args:
        template: gives the compiled grammar of a text.
    """

    def __init__(self, template: Callable[[str], Any | None], vocab_size: int) -> None:
        self._template = template
        self._num_words = -(-vocab_size // WORD_BITS)
        self._rows: dict[int, RowGrammar] = {}
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="masks")

    def set(self, new_rows: Iterable[NewRow]) -> None:
        """These requests have taken their rows; nothing is left of who had them before."""
        begun = []
        for new in new_rows:
            self._rows.pop(new.row, None)
            if new.params.grammar is not None:
                row = RowGrammar(self._template(new.params.grammar.text), new, self._num_words)
                self._rows[new.row] = row
                begun.append(row)
        begin(begun, self._threads)

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
        return GrammarStep(due, late, self._threads) if due or late else None

    def concerns(self, rows: npt.NDArray[np.integer]) -> bool:
        """Whether any of these rows has a grammar."""
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def begin(rows: Sequence[RowGrammar], threads: ThreadPoolExecutor) -> None:
    """Let the threads advance these rows."""
    fast = [row for row in rows if not row.is_slow]
    for part in (fast, *([row] for row in rows if row.is_slow)):
        if part:
            job = threads.submit(_advance_all, part)
            for row in part:
                row.job = job


def _advance_all(rows: Sequence[RowGrammar]) -> None:
    for row in rows:
        started = time.thread_time()
        row.advance()
        row.is_slow |= time.thread_time() - started > _SLOW_SECONDS


def _bits(token_ids: Sequence[int], num_words: int) -> IntArray:
    flags = np.zeros(num_words * WORD_BITS, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
