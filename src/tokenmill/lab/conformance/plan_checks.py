"""`PlanChecks`: a slow, obvious book of rows and pages, kept from launched plans alone.

Knows nothing of how a scheduler decides: it holds for every one. That pages have the right tokens is seen in what
`MemoryRunner` reads back from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.core.scheduling import SchedulerInterface
from tokenmill.engine.scheduler.config import SchedulerConfig


class SchedulerFault(AssertionError):
    """A scheduler has broken what every scheduler must hold; says what, and the seed that shows it again."""


def demand(holds: object, sentence: str) -> None:
    """Raise a fault unless something holds."""
    if not holds:
        raise SchedulerFault(sentence)


@dataclass(slots=True)
class Row:
    """A row of the tables, as plans have left it.

    Attributes:
        length: tokens of its owner that are known or that launched steps sample.
        computed: tokens that steps have run or found; None: its owner has just come.
        pages: its page table, by number.
    """

    owner: str
    length: int
    computed: int | None = None
    pages: dict[int, int] = field(default_factory=dict)


class PlanChecks:
    """Checks each plan of a scheduler when it is launched. Drafts and late samples are not expected."""

    def __init__(self, scheduler: SchedulerInterface[Any], config: SchedulerConfig, num_pages: int, size: int) -> None:
        """
        Args:
            size: of a page, in tokens.
        """
        self._scheduler = scheduler
        self._config = config
        self._num_pages = num_pages
        self._size = size
        self._step = 0
        self._rows: dict[int, Row] = {}
        # By launched step: pages, and the requests that use them; rows, and their owners.
        self._used: dict[int, dict[int, set[str]]] = {}
        self._in_rows: dict[int, dict[int, str]] = {}

    def launched(self, plan: StepPlan) -> None:
        """Check a plan, and enter it in the book.

        Raises:
            SchedulerFault: the plan cannot be run, or breaks what another request relies on.
        """
        demand(plan.step == self._step + 1, f"step {plan.step} comes after step {self._step}")
        self._step = plan.step
        demand(self._scheduler.step == plan.step, "`step` is not the number of the newest launched step")
        in_flight = [one.plan.step for one in self._scheduler.in_flight]
        demand(in_flight[-1:] == [plan.step], "a plan that was returned is not the last of `in_flight`")
        self._used = {step: pages for step, pages in self._used.items() if step in in_flight}
        self._in_rows = {step: rows for step, rows in self._in_rows.items() if step in in_flight}
        self._check_limits(plan)
        for new in plan.new_rows:
            entries = zip(plan.page_rows.tolist(), plan.page_numbers.tolist(), strict=True)
            self._enter(new, is_fresh=(new.row, 0) in entries)
        self._enter_pages(plan)
        used: dict[int, set[str]] = {}
        written: dict[int, str] = {}
        columns = zip(plan.request_ids, *(column.tolist() for column in _columns(plan)), strict=True)
        for request_id, row, start, count, num_samples in columns:
            self._run(request_id, row, start, count, num_samples)
            last = (start + count - 1) // self._size
            pages = [self._page(row, number) for number in range(last + 1)]
            for page in pages:
                used.setdefault(page, set()).add(request_id)
            written |= dict.fromkeys(pages[start // self._size :], request_id)
        self._used[plan.step] = used
        self._in_rows[plan.step] = dict(zip(plan.rows.tolist(), plan.request_ids, strict=True))
        for page, writer in written.items():
            users = set().union(*(pages.get(page, set()) for pages in self._used.values())) - {writer}
            demand(
                not users, f"request {writer} writes page {page}; a launched step of {min(users, default='')} uses it"
            )

    def _check_limits(self, plan: StepPlan) -> None:
        config, counts = self._config, plan.num_scheduled.tolist()
        demand(min(counts, default=1) > 0, "a request runs no token in a step that it is part of")
        demand(sum(counts) <= config.max_num_batched_tokens, f"{sum(counts)} tokens in a step, beyond its budget")
        demand(max(counts, default=0) <= config.largest_chunk, "a step runs more of a request than a chunk may have")
        demand(len(set(plan.rows.tolist())) == len(counts), "a row is twice in a step")
        demand(len(set(plan.request_ids)) == len(counts), "a request is twice in a step")
        rows = {*plan.rows.tolist(), *(new.row for new in plan.new_rows)}
        demand(rows <= set(range(config.max_num_seqs)), "a row that does not exist")
        demand(set(plan.page_ids.tolist()) <= set(range(1, self._num_pages + 1)), "a page that does not exist")
        demand({new.request_id for new in plan.new_rows} <= set(plan.request_ids), "a row is taken in vain")

    def _enter(self, new: AdmittedRequest, is_fresh: bool) -> None:
        """Give a row to a new owner, or, not `is_fresh`, to the old one that goes on with its pages."""
        for rows in self._in_rows.values():
            user = rows.get(new.row, new.request_id)
            demand(user == new.request_id, f"row {new.row} is given away, and a launched step of {user} still uses it")
        before = self._rows.get(new.row)
        keeps = before is not None and before.owner == new.request_id and not is_fresh
        table = before.pages if before is not None and keeps else {}
        self._rows[new.row] = Row(new.request_id, len(new.token_ids), None, table)

    def _enter_pages(self, plan: StepPlan) -> None:
        entries = zip(plan.page_rows.tolist(), plan.page_numbers.tolist(), plan.page_ids.tolist(), strict=True)
        for row, number, page in entries:
            demand(row in self._rows, f"a page for row {row}, which no request owns")
            table = self._rows[row].pages
            demand(table.get(number, page) == page, f"page {number} of request {self._rows[row].owner} is replaced")
            table[number] = page

    def _run(self, request_id: str, number: int, start: int, count: int, num_samples: int) -> None:
        row = self._rows.get(number)
        demand(row is not None and row.owner == request_id, f"request {request_id} runs in a row that it does not own")
        assert row is not None, "as demanded"
        expected = start if row.computed is None else row.computed
        demand(start == expected, f"request {request_id} goes on at token {start}, not at {expected}")
        end = start + count
        demand(end <= row.length, f"request {request_id} runs {end} tokens, {row.length} are known or being sampled")
        samples = int(end == row.length)
        demand(num_samples == samples, f"request {request_id} samples {num_samples} tokens, and should {samples}")
        row.computed = end
        row.length += samples

    def _page(self, row: int, number: int) -> int:
        page = self._rows[row].pages.get(number)
        demand(page is not None, f"request {self._rows[row].owner} runs without its page {number}")
        assert page is not None, "as demanded"
        return page


def _columns(plan: StepPlan) -> tuple[Any, ...]:
    return plan.rows, plan.num_computed, plan.num_scheduled, plan.num_samples
