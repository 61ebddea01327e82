"""The slow, obvious book of who may touch which page until when, kept from launched plans alone.

A launched step reads and writes the pages of its requests up to the tokens that it runs, until it is committed,
whatever has become of the request meanwhile; a load from elsewhere writes its pages until it is over, and whoever saves
or keeps pages reads them until that is over. No such page may go back to its pool, or be handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenmill.core.plan import PageEntries, StepPlan
from tokenmill.engine.kv.page_pool import PagePool
from tokenmill.engine.scheduler.resources.windows import Windows
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.engine.transfer.state import TransferState


class PageUses:
    """Watches the pools of a scheduler; `launched` is told of each plan before anything else happens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_checked = 0
        self._scheduler = scheduler
        self._table: dict[tuple[int, int], int] = {}
        self._window_table: dict[tuple[int, int], int] = {}
        self._by_step: dict[int, tuple[set[int], set[int]]] = {}
        self._watch(scheduler.kv.pool, self._full_pages)
        windows = scheduler.resource(Windows)
        self._windows = None if windows is None else windows.pages
        if self._windows is not None:
            self._watch(self._windows.pool, self._window_pages)

    def launched(self, plan: StepPlan) -> None:
        """Note what a step may touch."""
        entries = PageEntries(plan.page_rows, plan.page_numbers, plan.page_ids)
        _enter(self._table, entries)
        if plan.window_pages is not None:
            _enter(self._window_table, plan.window_pages)
        page_size, windows = self._scheduler.kv.page_size, self._windows
        full, behind = set(), set()
        for row, start, count in zip(
            plan.rows.tolist(), plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True
        ):
            last = (start + count - 1) // page_size
            full |= {self._table[row, number] for number in range(last + 1)}
            if windows is not None:
                first = max(0, start - windows.window + 1) // page_size
                behind |= {self._window_table[row, number] for number in range(first, last + 1)}
        if plan.page_copies is not None:
            full |= {*plan.page_copies[:2].flatten().tolist()}
        self._by_step[plan.step] = full, behind

    def _watch(self, pool: PagePool, in_use: Callable[[], set[int]]) -> None:
        allocate, free = pool.allocate, pool.free

        def watched_allocate(count: int) -> list[int]:
            pages = allocate(count)
            self._check(pages, in_use(), "is handed out")
            return pages

        def watched_free(pages: Sequence[int]) -> None:
            self._check(pages, in_use(), "goes back to the pool")
            free(pages)

        watched: Any = pool
        watched.allocate, watched.free = watched_allocate, watched_free

    def _check(self, pages: Sequence[int], in_use: set[int], what: str) -> None:
        self.num_checked += len(pages)
        touched = in_use & set(pages)
        assert not touched, f"page {min(touched)} {what}, and a launched step or a transfer may still touch it"

    def _full_pages(self) -> set[int]:
        in_flight = [step.plan.step for step in self._scheduler.in_flight]
        pages = set[int]().union(*(self._by_step[step][0] for step in in_flight if step in self._by_step))
        transfers = self._scheduler.resource(TransferState)
        if transfers is not None:
            pages |= {page for load in transfers.loads.values() for page in load.order.page_ids}
            pages |= {page for pin in transfers.pins.values() for page in pin.pages.tolist()}
        return pages

    def _window_pages(self) -> set[int]:
        in_flight = [step.plan.step for step in self._scheduler.in_flight]
        return set[int]().union(*(self._by_step[step][1] for step in in_flight if step in self._by_step))


def _enter(table: dict[tuple[int, int], int], entries: PageEntries) -> None:
    columns = zip(entries.rows.tolist(), entries.numbers.tolist(), entries.ids.tolist(), strict=True)
    table |= {(row, number): page for row, number, page in columns}
