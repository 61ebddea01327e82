"""`DraftRows`: which rows a step is drafted for, and which positions what drafts has to run first.

Rows whose drafts were not run are drafted for more rarely, up to every thirty-second step: the scheduler may find
that drafts do not pay, and drafting costs. Of the other rows whole pages are run, as they are filled: the prefix cache
may give these to any request.

Knows plans; no model, no device, and not the choice of the drafts that are run.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import IntArray, StepPlan

LongArray = npt.NDArray[np.int64]

# Rows that are drafted for in a step at most: beyond, a step is busy with the tokens of its requests.
MOST_ROWS = 32
# Steps that a row whose drafts are not run sits out at most, before it is drafted for again.
MOST_REST = 31


class Spans(msgspec.Struct, frozen=True):
    """Positions of n rows that have to be run to catch up with a step, and how far to draft behind each.

    Attributes:
        indices: [n], places in the step's batch, those with the longest drafts first. rows: [n].
        starts, stops: [n], the positions to run: from the first, up to before the second.
        limits: [n], tokens to draft; 0: none.
        num_pages: [n], pages of the row once the step has run.
    """

    indices: LongArray
    rows: IntArray
    starts: LongArray
    stops: LongArray
    limits: LongArray
    num_pages: LongArray


class DraftRows:
    """Keeps of each row how much of its text has been run, where it ends, and whether its drafts are of use.

    Args:
        num_tokens: most tokens to draft.
        max_len: tokens of a text that can be run; behind them there are no drafts.
        first_position: of a text that is run.
    """

    def __init__(self, num_rows: int, page_size: int, num_tokens: int, max_len: int, first_position: int) -> None:
        self._page_size = page_size
        self._num_tokens = num_tokens
        self._max_len = max_len
        self._first_position = first_position
        # Where the text of each row ends at the latest; 0: no drafts for it.
        self._ends = np.zeros(num_rows, dtype=np.int64)
        # Tokens of each row whose KV is in its pages.
        self._num_written = np.zeros(num_rows, dtype=np.int64)
        # Whether it has drafts of a step before; how many steps it sat out the last time, and when that ends.
        self._has_drafts = np.zeros(num_rows, dtype=np.bool_)
        self._rest, self._next_step = np.zeros((2, num_rows), dtype=np.int64)
        # Where a new row begins: with the shortest rest of those that were judged last.
        self._newest_rest = 0

    def enter(self, plan: StepPlan) -> None:
        """Take in new rows, and which drafts of the other rows were run."""
        num_computed = dict(zip(plan.rows.tolist(), plan.num_computed.tolist(), strict=True)) if plan.new_rows else {}
        for new in plan.new_rows:
            row, params = new.row, new.params
            is_drafted_for = params.grammar is None and new.pooling is None
            end = self._max_len if params.max_tokens is None else new.num_prompt_tokens + params.max_tokens
            self._ends[row] = min(end, self._max_len) if is_drafted_for else 0
            # What it has computed it has found in the cache, or filled before it paused: whole pages are written.
            written = num_computed[row] // self._page_size * self._page_size
            self._num_written[row] = max(written, self._first_position)
            self._has_drafts[row] = False
            self._rest[row], self._next_step[row] = self._newest_rest, plan.step + self._newest_rest
        judged = self._has_drafts[plan.rows] & (plan.num_samples > 0)
        if judged.any():
            rows, are_run = plan.rows[judged], plan.num_samples[judged] > 1
            self._rest[rows] = np.where(are_run, 0, np.minimum(2 * self._rest[rows] + 1, MOST_REST))
            self._next_step[rows] = plan.step + self._rest[rows]
            self._newest_rest = int(self._rest[rows].min())
            self._has_drafts[rows] = False

    def drafted(self, rows: IntArray, have_any: npt.NDArray[np.bool_]) -> None:
        """Take in which rows have drafts now."""
        self._has_drafts[rows] = have_any

    def spans(self, plan: StepPlan, num_brought: IntArray) -> Spans | None:
        """Find the positions to run and draft for; None if there are none. They count as run from here on.

        Args:
            num_brought: [B], tokens that the step brings, or the most that it may bring: what turns out not to be
                brought is run anew.
        """
        rows, page_size, samples = plan.rows, self._page_size, num_brought > 0
        # What a step ran in vain, behind a token that was then drawn again, is run anew.
        starts = self._num_written[rows] = np.minimum(self._num_written[rows], plan.num_computed + 1)
        launched = plan.num_computed + plan.num_scheduled
        ends = launched - np.maximum(plan.num_samples - num_brought, 0)
        filled = np.minimum(ends - ends % page_size, self._max_len)
        is_due = samples & (self._next_step[rows] <= plan.step)
        if not is_due.any() and (filled <= starts).all():
            return None
        known = ends + samples
        limits = np.where(is_due, np.minimum(self._ends[rows] - known - 1, self._num_tokens).clip(min=0), 0)
        limits[np.cumsum(limits > 0) > MOST_ROWS] = 0
        stops = np.where(limits > 0, known, filled)
        num_pages = -(-launched // page_size)
        self._num_written[rows] = np.maximum(starts, np.minimum(stops, num_pages * page_size))
        indices = np.flatnonzero(starts < stops)
        if not len(indices):
            return None
        # Those with the longest drafts first: the rows of each further pass are the first ones of the pass before.
        indices = indices[np.argsort(-limits[indices], kind="stable")]
        starts, stops, limits = starts[indices], stops[indices], limits[indices]
        return Spans(indices, rows[indices], starts, stops, limits, num_pages[indices].astype(np.int64))
