"""The grammar of one row, and the threads that fill masks.

Masks of many rows are filled together in two calls of llguidance that need no interpreter lock; one that has held the
others up is filled alone the next time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import AdmittedRequest
from tokenmill.model.sampling.bitmask import WORD_BITS
from tokenmill.model.sampling.thoughts import Thoughts
from tokenmill.model.structured.compiler import explain
from tokenmill.model.structured.openings import LazyTemplate

logger = logging.getLogger(__name__)

_MAX_THREADS = 4
# Rows whose masks took longer than this together are advanced one by one the next time: one of them may be slow.
SLOW_SECONDS = 0.005
# So many forced tokens more may be wrong than right.
_FIRST_TRUST = 6

_DONE: Future[None] = Future()
_DONE.set_result(None)

IntArray = npt.NDArray[np.int32]


class RowGrammar:
    """The matcher of one row and its next masks. While its job runs, the job owns both.

    Attributes:
        job: the work that fills the masks, queued or done.
        position: index in its sequence of the token that comes next.
        masks: [n, ceil(V / 32)] int32, for that token, and for one behind each draft that the grammar allows.
        masks_first: it draws once, from what the mask leaves; any other row draws optimistically.
        goes_unmasked: a mask is filled for it only where its matcher refuses what it drew.
        has_mask: it is filled, or being filled; if not, the matcher is asked about the token that was drawn.
        matcher: llguidance's; None: the row has failed.
        is_free: its masks have all tokens.
        taken: sampled tokens that the matcher has not seen.
        is_slow: what it did last took long, or one of those that were filled with it did.
        failure: why the row cannot go on; "" while all is well.
    """

    def __init__(self, template: Any | None, new_row: AdmittedRequest, vocab_size: int, on_host: bool) -> None:
        self.position = len(new_row.token_ids)
        num_words = -(-vocab_size // WORD_BITS)
        self.masks: IntArray = np.zeros((1, num_words), dtype=np.int32)
        self._padding = _bits(range(vocab_size, num_words * WORD_BITS), num_words)[-1]
        self._own_masks, self._address = self.masks, self.masks.ctypes.data
        self.matcher = template.deep_copy() if template is not None else None
        self.taken: list[int] = new_row.token_ids[new_row.num_prompt_tokens :].tolist()
        self.failure = "" if template is not None else "its grammar is gone"
        self.is_free = False
        self.job = _DONE
        self.masks_first = new_row.params.is_filtered
        self.goes_unmasked = on_host and not self.masks_first
        self._openings = template.openings if isinstance(template, LazyTemplate) else None
        self._is_in_text = isinstance(template, LazyTemplate) and template.begins_free
        self._tail = b""
        self.taken = [token_id for token_id in self.taken if self._hears(token_id)]
        budget = None if new_row.params.grammar is None else new_row.params.grammar.thinking
        output = new_row.token_ids[new_row.num_prompt_tokens :].tolist()
        self._thoughts = None if budget is None else Thoughts(budget, output)
        self.has_mask = not self.goes_unmasked or bool(self.taken)
        self.is_slow = self.has_mask
        self._first_stop_position = new_row.num_prompt_tokens + new_row.params.min_tokens
        self._stop_token_ids = new_row.stop_token_ids
        self._forced: list[int] = []
        # Forced tokens that came minus those that did not. Where a model spells otherwise, no more are looked for.
        self._trust = _FIRST_TRUST

    def before_stop(self, token_ids: list[int]) -> list[int]:
        """Return the first of these tokens, up to one that ends the request."""
        return list(takewhile(lambda token_id: token_id not in self._stop_token_ids, token_ids))

    @property
    def dozes(self) -> bool:
        """True in free text whose end begins no mark: any token may follow, and few must reach the matcher."""
        return self._is_in_text and not self._tail

    def note_token(self, token_id: int) -> bool:
        """Note a sampled token for the next job to take in, unless the token ends the request."""
        self.position += 1
        if self._thoughts is not None:
            self._thoughts.add_token(token_id)
        if token_id not in self._stop_token_ids and self._hears(token_id):
            self.taken.append(token_id)
        return True

    def advance(self) -> None:
        """Take in the sampled tokens and fill the next mask."""
        if not self.rests():
            self._with_matcher(self._advance)

    def rests(self) -> bool:
        """Return True if the next mask has all tokens without a question to the matcher; it is there now."""
        if not self.dozes or self.taken or self.matcher is None or (self._thoughts and self._thoughts.forced):
            return False
        if not (self.is_free and self.masks is self._own_masks):
            self._own_masks.fill(-1)
            self._own_masks[:, -1] &= ~self._padding
        self.masks, self.has_mask, self.is_free, self.is_slow = self._own_masks, True, True, False
        self._put_off_stops(self.masks)
        return True

    def follow(self) -> None:
        """Take in the sampled tokens and fill no mask."""
        self.has_mask = False
        self._with_matcher(self._consume)

    def allows(self, token_id: int, number: int) -> bool:
        """Return True if the mask of this number, which must be filled, has this token."""
        return bool(int(self.masks[number, token_id // WORD_BITS]) >> token_id % WORD_BITS & 1)

    def accepts(self, token_id: int) -> bool:
        """Take in a token that a row without a mask drew, if its mask would have it.

        Where the matcher does not allow it, the mask is filled to decide, and the token is not taken in. Of stop ids
        the matcher says nothing: which of them a mask has depends on `settle`, and on what else it has.
        """
        thoughts = self._thoughts
        if thoughts is None:
            return self._accepts(token_id)
        if thoughts.refuses(token_id):
            self.advance()
            return False
        if not self._accepts(token_id):
            return False
        thoughts.add_token(token_id)
        return True

    def _accepts(self, token_id: int) -> bool:
        matcher = self.matcher
        if matcher is None:
            return False
        if token_id not in self._stop_token_ids:
            if self._openings is not None and self.dozes and not self._openings.stirs[token_id]:
                self.position += 1
                return True
            try:
                if matcher.validate_tokens([token_id]):
                    self.position += 1
                    self._hears(token_id)
                    is_well = matcher.consume_token(token_id) or self._check(matcher)
                    self._look_for_text(matcher)
                    return is_well
            except Exception:
                self.fail()
        self.advance()
        return False

    def forced(self, brought: list[int]) -> list[int]:
        """Return tokens that spell the only text that the grammar allows behind what the row was `brought` last.

        The model may spell it otherwise: masks have all tokens that fit, these are the tokenizer's own.
        """
        if self._thoughts is not None and (rest := self._thoughts.forced):
            self._forced = []
            return list(rest)
        former = self._forced
        came = list(takewhile(lambda pair: pair[0] == pair[1], zip(former, brought, strict=False)))
        is_right = len(came) == min(len(former), len(brought))
        self._trust += len(came) if is_right else 2 * len(came) - len(former)
        self._forced = former[len(came) :] if is_right else []
        if not self._forced and self._trust >= 0 and not self.dozes:
            was_slow = self.is_slow
            self._with_matcher(self._force)
            self._trust, self.is_slow = -1 if self.is_slow else self._trust, was_slow
        return self._forced

    def settle(self, masks: IntArray, drafts: Sequence[int] = ()) -> None:
        """Note that the matcher has filled `masks`, the later ones behind `drafts`, or failed."""
        self.masks, self.has_mask = masks, True
        assert self.matcher is not None, "a row that has failed is not advanced"
        self.is_free = self._has_all(masks)
        if self._check(self.matcher):
            self._is_in_text |= self._openings is not None and self.is_free and self.matcher.is_accepting()
            self._put_off_stops(masks)
            self._end_thinking(masks, drafts)

    def _end_thinking(self, masks: IntArray, drafts: Sequence[int]) -> None:
        """Leave the masks what must come, where the budget of thinking is used up."""
        thoughts = self._thoughts
        for number, mask in enumerate(masks if thoughts is not None else ()):
            assert thoughts is not None
            if thoughts.forced:
                mask[:] = _bits(thoughts.forced[:1], len(mask))
                self.is_free = False
            thoughts = thoughts.after(drafts[number : number + 1])

    def _put_off_stops(self, masks: IntArray) -> None:
        num_early = self._first_stop_position - self.position
        if num_early > 0:
            # Where the grammar leaves nothing but the end, the end it is.
            without_stops = masks[:num_early] & ~_bits(self._stop_token_ids, masks.shape[1])
            is_rest = without_stops.any(1)
            masks[:num_early][is_rest] = without_stops[is_rest]
            self.is_free = False

    def fail(self) -> None:
        """Log an exception from llguidance, and mark the row as failed."""
        logger.exception("a grammar failed")
        self.failure, self.matcher = "its grammar failed", None

    def _hears(self, token_id: int) -> bool:
        """Follow the text by a token; return True if the matcher must take it in."""
        openings = self._openings
        if openings is None:
            return True
        if self.dozes and not openings.stirs[token_id]:
            return False
        tail = openings.tail(self._tail, token_id)
        if tail is None:
            self._is_in_text = False
            tail = openings.tail(b"", token_id) or b""
        self._tail = tail
        return True

    def _look_for_text(self, matcher: Any) -> None:
        """Find out whether a row that fills no masks is in free text again."""
        if self._openings is not None and not self._is_in_text and matcher.is_accepting():
            self.is_free = False
            matcher.unsafe_compute_mask_ptr(self._address, self._own_masks.nbytes)
            self._is_in_text = self._has_all(self._own_masks)

    def _has_all(self, masks: IntArray) -> bool:
        return bool((masks[:, :-1] == -1).all() and (masks[:, -1] | self._padding == -1).all())

    def _with_matcher(self, work: Callable[[Any], bool]) -> bool:
        """Run and time some work of the matcher; an exception in llguidance fails this row alone."""
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
        matcher.unsafe_compute_mask_ptr(self._address, self._own_masks.nbytes)
        self.settle(self._own_masks)
        return not self.failure

    def _force(self, matcher: Any) -> bool:
        if self._consume(matcher):
            # In a copy: once bytes are forced, masks of a grammar without forcing may be wrong. The tokens are theirs.
            copy = matcher.deep_copy()
            if copy.compute_ff_bytes():
                self._forced = self.before_stop(copy.compute_ff_tokens())
        return True

    def _consume(self, matcher: Any) -> bool:
        taken, self.taken = self.taken, []
        return not taken or matcher.consume_tokens(taken) or self._check(matcher)

    def _check(self, matcher: Any) -> bool:
        """Return True if the matcher can go on."""
        if matcher.is_error():
            self.failure, self.matcher = f"its grammar cannot go on: {explain(matcher)}", None
        return not self.failure


class MaskThreads:
    """Brings rows up to date beside the model's passes. llguidance is not imported before the first row."""

    def __init__(self) -> None:
        self._num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="masks")

    @cached_property
    def _executor(self) -> Any:
        import llguidance

        return llguidance.LLExecutor(self._num_threads)

    def begin_masks(self, rows: Sequence[RowGrammar]) -> None:
        """Advance these rows: fast ones together, every other one on its own."""
        asked = []
        for row in rows:
            if row.rests():
                row.job = _DONE
            else:
                asked.append(row)
        fast = [row for row in asked if not row.is_slow]
        if fast:
            self._submit(fast)
        for row in asked:
            if row.is_slow:
                self._submit([row])

    def look_ahead(self, drafted: Sequence[tuple[RowGrammar, list[int]]], at_once: bool) -> None:
        """Fill the masks of these rows behind drafts too, as soon as they have those of their next tokens.

        Args:
            at_once: fill those of fast rows before this returns, but of one that a job still owns: where that was late,
                it fills masks behind the drafts of the step before.
        """
        if not drafted:
            return
        is_fast = [not row.is_slow and (row.job.done() or not at_once) for row, _ in drafted]
        fast = [one for one, is_so in zip(drafted, is_fast, strict=True) if is_so]
        groups = [[one] for one, is_so in zip(drafted, is_fast, strict=True) if not is_so]
        if at_once:
            self._fill_ahead(fast, [])
        elif fast:
            groups.append(fast)
        for group in groups:
            job = self._threads.submit(self._fill_ahead, group, [row.job for row, _ in group])
            for row, _ in group:
                row.job = job

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
        masks = np.zeros((len(alive), 1, rows[0].masks.shape[1]), dtype=np.int32)
        try:
            matchers: list[Any] = [row.matcher for row in alive]
            while taken := [(row.matcher, row.taken.pop(0)) for row in alive if row.taken]:
                self._executor.consume_token_par(taken)
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

    def _fill_ahead(self, drafted: Sequence[tuple[RowGrammar, list[int]]], before: Sequence[Future[None]]) -> None:
        wait(before)  # they have begun: threads take jobs in order
        started = time.perf_counter()
        alive = [(row, row.matcher, drafts) for row, drafts in drafted if row.matcher is not None]
        if not alive:
            return
        ends = np.cumsum([1 + len(drafts) for *_, drafts in alive]).tolist()
        masks = np.zeros((ends[-1], alive[0][0].masks.shape[1]), dtype=np.int32)
        try:
            # A draft leads where the output may never go: what fails there fails in a copy.
            work = [
                (matcher.deep_copy(), end - 1 - len(drafts), drafts)
                for (_, matcher, drafts), end in zip(alive, ends, strict=True)
            ]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(work, masks.ctypes.data, masks[0].nbytes, ends[-1])
        except Exception:
            for row, *_ in alive:
                row.fail()
            return
        is_slow = time.perf_counter() - started > SLOW_SECONDS
        for (row, *_), (copy, start, drafts) in zip(alive, work, strict=True):
            own = masks[start : start + 1 + len(drafts)]
            own[0] = row.masks[0]
            # Behind a draft that the grammar refuses none is filled; one that fails is filled with the end of texts.
            row.settle(own[: max(1, np.count_nonzero(own.any(1)) - copy.is_error())], drafts)
            row.is_slow = is_slow


def _bits(token_ids: Iterable[int], num_words: int) -> IntArray:
    flags = np.zeros(num_words * WORD_BITS, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
