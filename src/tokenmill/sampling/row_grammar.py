"""The grammar of one row, and the threads that fill masks.

Masks of many rows are filled together in two calls of llguidance that need no interpreter lock; one that has held the
others up is filled alone the next time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import AdmittedRequest
from tokenmill.sampling.bitmask import WORD_BITS
from tokenmill.structured.compiler import explain

logger = logging.getLogger(__name__)

_MAX_THREADS = 4
# Rows whose masks took longer than this together are advanced one by one the next time: one of them may be slow.
SLOW_SECONDS = 0.005

IntArray = npt.NDArray[np.int32]


class RowGrammar:
    """The matcher of one row and its next mask. While its job runs, the job owns both.

    Attributes:
        job: the work that fills the mask, queued or done.
        position: index in its sequence of the token that comes next.
        mask: [ceil(V / 32)] int32, for that token.
        masks_first: it draws once, from what the mask leaves; any other row draws optimistically.
        goes_unmasked: a mask is filled for it only where its matcher refuses what it drew.
        has_mask: it is filled, or being filled; if not, the matcher is asked about the token that was drawn.
        matcher: llguidance's; None: the row has failed.
        taken: sampled tokens that the matcher has not seen.
        is_slow: what it did last took long, or one of those that were filled with it did.
        failure: why the row cannot go on; "" while all is well.
    """

    def __init__(self, template: Any | None, new_row: AdmittedRequest, num_words: int, on_host: bool) -> None:
        self.position = len(new_row.token_ids)
        self.mask: IntArray = np.zeros(num_words, dtype=np.int32)
        self._own_mask, self._address = self.mask, self.mask.ctypes.data
        self.matcher = template.deep_copy() if template is not None else None
        self.taken: list[int] = new_row.token_ids[new_row.num_prompt_tokens :].tolist()
        self.failure = "" if template is not None else "its grammar is gone"
        self.job: Future[None] = Future()
        self.masks_first = new_row.params.is_filtered
        self.goes_unmasked = on_host and not self.masks_first
        self.has_mask = not self.goes_unmasked or bool(self.taken)
        self.is_slow = self.has_mask
        self._first_stop_position = new_row.num_prompt_tokens + new_row.params.min_tokens
        self._stop_token_ids = new_row.stop_token_ids

    def take(self, token_id: int) -> None:
        """The row has sampled this token; the next job takes it in."""
        self.position += 1
        if not self._is_end(token_id):
            self.taken.append(token_id)

    def advance(self) -> None:
        """Take in the sampled tokens and fill the next mask."""
        self._with_matcher(self._advance)

    def follow(self) -> None:
        """Take in the sampled tokens and fill no mask."""
        self.has_mask = False
        self._with_matcher(self._consume)

    def allows(self, token_id: int) -> bool:
        """Whether the mask, which is there, has this token."""
        return bool(int(self.mask[token_id // WORD_BITS]) >> token_id % WORD_BITS & 1)

    def accepts(self, token_id: int) -> bool:
        """Take in a token that a row without a mask drew, if its mask would have it.

        Where the matcher does not say so, the mask is filled to tell, and the token is not taken in. Of stop ids it
        says nothing: which of them a mask has depends on `settle`, and on what else it has.
        """
        matcher = self.matcher
        if matcher is None:
            return False
        if token_id not in self._stop_token_ids:
            try:
                if matcher.validate_tokens([token_id]):
                    self.position += 1
                    return matcher.consume_token(token_id) or self._check(matcher)
            except Exception:
                self.fail()
        self.advance()
        return False

    def settle(self, mask: IntArray) -> None:
        """The matcher has filled `mask`, or failed."""
        self.mask, self.has_mask = mask, True
        assert self.matcher is not None, "a row that has failed is not advanced"
        if self._check(self.matcher) and self.position < self._first_stop_position:
            # Where the grammar leaves nothing but the end, the end it is.
            without_stops = mask & ~_bits(self._stop_token_ids, len(mask))
            if without_stops.any():
                self.mask = without_stops

    def fail(self) -> None:
        """An exception came out of llguidance."""
        logger.exception("a grammar failed")
        self.failure, self.matcher = "its grammar failed", None

    def _with_matcher(self, work: Callable[[Any], bool]) -> bool:
        """The outcome of something that is timed; whatever llguidance meets there concerns this row alone."""
        if self.matcher is None:
            return False
        started = time.thread_time()
        try:
            return work(self.matcher)
        except Exception:
            self.fail()
            return False
        finally:
            self.is_slow = time.thread_time() - started > SLOW_SECONDS

    def _advance(self, matcher: Any) -> bool:
        if not self._consume(matcher):
            return False
        matcher.unsafe_compute_mask_ptr(self._address, self._own_mask.nbytes)
        self.settle(self._own_mask)
        return not self.failure

    def _is_end(self, token_id: int) -> bool:
        """Whether this ends an output that is complete: llguidance wants to hear no more then."""
        matcher = self.matcher
        return (
            token_id in self._stop_token_ids and matcher is not None and matcher.is_stopped() and not matcher.is_error()
        )

    def _consume(self, matcher: Any) -> bool:
        taken, self.taken = self.taken, []
        return not taken or matcher.consume_tokens(taken) or self._check(matcher)

    def _check(self, matcher: Any) -> bool:
        """Whether the matcher can go on."""
        if matcher.is_error():
            self.failure, self.matcher = f"its grammar cannot go on: {explain(matcher)}", None
        return not self.failure


class MaskThreads:
    """Brings rows up to date beside the model's passes. llguidance is not imported before the first row."""

    def __init__(self) -> None:
        self._num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="masks")
        self._executor: Any = None

    def begin(self, rows: Sequence[RowGrammar]) -> None:
        """Advance these rows: those that have been fast together, every other one on its own."""
        if rows and self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor(self._num_threads)
        fast = [row for row in rows if not row.is_slow]
        if fast:
            self._submit(fast)
        for row in rows:
            if row.is_slow:
                self._submit([row])

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _submit(self, rows: list[RowGrammar]) -> None:
        job = self._threads.submit(rows[0].advance) if len(rows) == 1 else self._threads.submit(self._together, rows)
        for row in rows:
            # From now on the job owns the matcher: nothing is offered to it.
            row.job, row.has_mask = job, True

    def _together(self, rows: Sequence[RowGrammar]) -> None:
        started = time.perf_counter()
        alive = [row for row in rows if row.matcher is not None]
        masks = np.zeros((len(alive), len(rows[0].mask)), dtype=np.int32)
        try:
            matchers: list[Any] = [row.matcher for row in alive]
            self._executor.consume_token_par(
                [(matcher, row.taken.pop()) for matcher, row in zip(matchers, alive, strict=True) if row.taken]
            )
            going_on = [(matcher, index) for index, matcher in enumerate(matchers) if not matcher.is_error()]
            self._executor.unsafe_compute_mask_ptr(going_on, masks.ctypes.data, masks[0].nbytes, len(alive))
        except Exception:
            for row in alive:
                row.fail()
            return
        is_slow = time.perf_counter() - started > SLOW_SECONDS
        for row, mask in zip(alive, masks, strict=True):
            row.is_slow = is_slow
            row.settle(mask)


def _bits(token_ids: Sequence[int], num_words: int) -> IntArray:
    flags = np.zeros(num_words * WORD_BITS, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
