"""`WindowPages`: manage the pages of layers that attend to a window, which go when no later token can reach them.

    pages of a request in the full group    |<-------------------------------------------------------->|
    the same in this one                               |<- window - 1 before a boundary ->|<- launched ->|
                                          gone, or the tree's to be found or evicted

The page table is append-only at its end; pages go from its front, at the commit of the step that leaves them behind.

**In the tree** such a page stands beside a page of the full group: the second array of a node is `beside[node.pages]`,
0 where there is a hole. It may be evicted when no request has it in its table, whatever becomes of the full page; a hit
must end where the window's pages before it are all there. Two queues set the order of eviction: pages that fell behind
a window and were never found, then the rest; each by the time of release or of the last look.

**No running request is ever short of them.** Each is promised as many pages as it has in the full group, at most
`most_pages`; promises are counted against all pages less those that launched steps may run ahead, and a request waits
or yields for its promise alone. So taking pages cannot fail. Where the group has as many pages as the full one, no
promises are needed: each page in use stands beside a full page in use.

Does not know tokens, nodes or the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidRequest
from tokenmill.engine.kv.page_pool import RESERVED_PAGES, PagePool
from tokenmill.engine.kv.radix_node import PageArray


class WindowSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """A window group.

    Attributes:
        window: most tokens that its layers attend to. num_pages: without the reserved one.
        num_for_saves: of these, pages that saves may read while nothing is left to promise.
    """

    window: int
    num_pages: int
    num_for_saves: int = 0


def most_window_pages(window: int, page_size: int) -> int:
    """Return the most pages that one request needs at a time, without those for tokens that steps run ahead.

    From the last page boundary that is computed, `window - 1` tokens back; the page that is filled, and the next one.
    """
    return -(-(window - 1) // page_size) + 2


def pages_of_window(num_pages: int, window: int, page_size: int) -> int:
    """Return how many of `num_pages` pages, the last ones, tokens behind them reach."""
    return num_pages - max(0, num_pages * page_size - window + 1) // page_size


def num_pages_ahead(num_tokens: int, page_size: int) -> int:
    """Return the pages that launched steps of `num_tokens` tokens may need beyond their `most_window_pages`."""
    return num_tokens // page_size


@dataclass(slots=True)
class WindowTable:
    """The window pages of one request, load or save: numbers `first` to `first + len(pages) - 1`.

    Attributes:
        num_sent: pages below this number are in a plan already.
        num_promised: pages that are promised to the request.
    """

    first: int
    pages: list[int]
    num_sent: int
    num_promised: int

    @property
    def end(self) -> int:
        """Number behind the last page's."""
        return self.first + len(self.pages)


class WindowPages:
    """Bookkeeping of the window group. Invariant: free + evictable + pinned (in tables) == usable.

    Attributes:
        most_pages: most pages that are promised to one request. num_for_saves: see `WindowSettings`.
        beside: [num_full_pages] int32, the window page beside a full page of the tree; 0: a hole.
    """

    def __init__(self, settings: WindowSettings, page_size: int, num_full_pages: int, most_ahead: int) -> None:
        """
        Args:
            num_full_pages: pages of the full group, including page 0.
            most_ahead: most tokens that launched steps run, of all requests.
        """
        self.pool = PagePool(settings.num_pages + RESERVED_PAGES)
        self.window, self.page_size = settings.window, page_size
        self.most_pages = most_window_pages(self.window, page_size)
        self.is_ample = settings.num_pages >= num_full_pages - RESERVED_PAGES
        self.num_promised = 0
        self.beside = np.zeros(num_full_pages, dtype=np.int32)
        self.num_for_saves = settings.num_for_saves
        self._capacity = settings.num_pages - num_pages_ahead(most_ahead, page_size) - self.num_for_saves
        self._full_of: dict[int, int] = {}  # pages in the tree
        self._num_users = [0] * self.pool.num_pages  # tables that have a page
        self._was_found = bytearray(self.pool.num_pages)
        self._behind: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._tables: dict[str, WindowTable] = {}

    @property
    def num_evictable(self) -> int:
        """Number of pages that only the tree holds."""
        return len(self._behind) + len(self._kept)

    @property
    def num_pinned(self) -> int:
        """Number of pages in tables of requests."""
        return self.pool.num_usable - self.pool.num_free - self.num_evictable

    @property
    def num_left(self) -> int:
        """Number of pages that may still be promised."""
        return self.pool.num_usable if self.is_ample else self._capacity - self.num_promised

    def num_wanted(self, num_full_pages: int) -> int:
        """Return the pages to promise a request with `num_full_pages` of the full group."""
        return 0 if self.is_ample else min(num_full_pages, self.most_pages)

    def check_size(self, num_full_pages: int) -> None:
        """Raise InvalidRequest for a request that could never have `num_full_pages` of the full group."""
        wanted = self.num_wanted(num_full_pages)
        if not self.is_ample and wanted > self._capacity:
            raise InvalidRequest(
                f"a window needs {wanted} pages of the KV cache; it has {max(0, self._capacity)} for it"
            )

    @property
    def users(self) -> Set[str]:
        """Ids under which tables are open."""
        return self._tables.keys()

    def promised_to(self, request_id: str) -> int:
        """Return the number of pages promised to a request; 0 if it has no table."""
        table = self._tables.get(request_id)
        return 0 if table is None else table.num_promised

    def promise(self, request_id: str, num_full_pages: int) -> None:
        """Set the promise of a request that now has `num_full_pages` of the full group."""
        table, wanted = self._tables[request_id], self.num_wanted(num_full_pages)
        self.num_promised += wanted - table.num_promised
        table.num_promised = wanted

    def first_reached(self, num_computed: int) -> int:
        """Return the first page that tokens from the page boundary at or before `num_computed` on may reach."""
        num_pages = num_computed // self.page_size
        return num_pages - pages_of_window(num_pages, self.window, self.page_size)

    def num_reached(self, full_pages: PageArray) -> int:
        """Return how many pages of a path in the tree are a hit here too."""
        beside, numbers = self.beside[full_pages], np.arange(1, len(full_pages) + 1)
        # At boundary n the pages from first[n - 1] on must be there: the last hole lies before them.
        last_hole = np.maximum.accumulate(np.where(beside == 0, numbers, 0))
        first = np.maximum(0, numbers * self.page_size - self.window + 1) // self.page_size
        hits = np.flatnonzero(last_hole <= first)
        return int(hits[-1]) + 1 if len(hits) else 0

    def reach(self, full_pages: PageArray) -> int:
        """Do `num_reached`; the pages that this needs count as used."""
        num_pages = self.num_reached(full_pages)
        for page in self.beside[full_pages[self.first_reached(num_pages * self.page_size) : num_pages]].tolist():
            if not self._num_users[page]:
                self._behind.pop(page, None)
                self._kept[page] = None
                self._kept.move_to_end(page)
        return num_pages

    def open(
        self, request_id: str, matched: PageArray, num_full_pages: int, start: int | None = None, is_hit: bool = True
    ) -> None:
        """Give a request a table that begins with the matched pages it needs; see `reach`.

        Args:
            start: tokens behind which it begins; None: the matched ones. is_hit: the pages count as found.
        """
        first = self.first_reached(len(matched) * self.page_size if start is None else start)
        pages = self.beside[matched[first:]].tolist()
        for page in pages:
            assert page, "a hit with a hole in its window"
            if not self._num_users[page]:
                self._behind.pop(page, None)
                self._kept.pop(page, None)
            self._num_users[page] += 1
            self._was_found[page] |= is_hit
        self._tables[request_id] = WindowTable(first, pages, first, 0)
        self.promise(request_id, num_full_pages)

    def cover(self, request_id: str, num_tokens: int) -> tuple[int, list[int]]:
        """Lengthen a table to hold `num_tokens` tokens, which a step is about to compute.

        Returns:
            Entries of the page table that are in no plan yet: the number of the first, and the pages.
        """
        table = self._tables[request_id]
        missing = -(-num_tokens // self.page_size) - table.end
        if missing > 0:
            self._evict(missing - self.pool.num_free)
            fresh = self.pool.allocate(missing)
            for page in fresh:
                self._num_users[page] = 1
            table.pages += fresh
        first, table.num_sent = table.num_sent, table.end
        return first, table.pages[first - table.first :]

    def page_at(self, request_id: str, number: int) -> int:
        """Return a request's page of that number, which it has."""
        table = self._tables[request_id]
        return table.pages[number - table.first]

    def keep(self, request_id: str, num_computed: int, is_idle: bool) -> None:
        """Release the pages behind the window: a step is committed, and later ones begin at `num_computed` or behind.

        Args:
            is_idle: no launched step runs the request, so pages past `num_computed`, of rejected drafts, go too.
        """
        table = self._tables[request_id]
        num_gone = self.first_reached(num_computed) - table.first
        if num_gone > 0:
            gone, table.pages = table.pages[:num_gone], table.pages[num_gone:]
            table.first += num_gone
            self._drop(gone, is_behind=True)
        last = max(table.first, -(-num_computed // self.page_size))
        if is_idle and last < table.end:
            surplus = table.pages[last - table.first :]
            del table.pages[last - table.first :]
            table.num_sent = min(table.num_sent, last)
            self._drop(surplus[::-1], is_behind=True)

    def offer(self, request_id: str, first: int, full_pages: Sequence[int]) -> None:
        """Put a request's pages from number `first` on beside these pages of the tree that have none."""
        table = self._tables[request_id]
        for number, full_page in enumerate(full_pages, first):
            if number >= table.first and not self.beside[full_page]:
                page = table.pages[number - table.first]
                assert page not in self._full_of, "a window page beside two pages"
                self.beside[full_page], self._full_of[page] = page, full_page

    def forget_pages(self, full_pages: Iterable[int]) -> None:
        """Free the pages beside these pages, which the tree has given up."""
        for full_page in full_pages:
            page = int(self.beside[full_page])
            if page:
                assert not self._num_users[page], "the tree gave up a page whose window is in use"
                self._behind.pop(page, None)
                self._kept.pop(page, None)
                self._give_up(page)

    def close(self, request_id: str) -> None:
        """Take back all pages of a request; those in the tree are evicted last: its next turn would begin there."""
        table = self._tables.pop(request_id)
        self.num_promised -= table.num_promised
        self._drop(table.pages[::-1], is_behind=False)

    def _drop(self, pages: Iterable[int], is_behind: bool) -> None:
        for page in pages:
            self._num_users[page] -= 1
            if self._num_users[page]:
                continue
            if page not in self._full_of:
                self.pool.free([page])
            elif is_behind and not self._was_found[page]:
                self._behind[page] = None
            else:
                self._kept[page] = None

    def _evict(self, count: int) -> None:
        for _ in range(count):
            assert self.num_evictable, "a promise of window pages is broken"
            self._give_up((self._behind or self._kept).popitem(last=False)[0])

    def _give_up(self, page: int) -> None:
        """Remove a page from the tree and free it; no table has it."""
        self.beside[self._full_of.pop(page)] = 0
        self._was_found[page] = 0
        self.pool.free([page])

    def check_invariants(self, ends: dict[str, tuple[int, int]]) -> None:
        """Raise AssertionError if a page is lost or shared, a table lacks a readable page, or a promise is off.

        Args:
            ends: for each request that holds pages, the tokens that all its further steps begin behind, and the number
                of its pages in the full group.
        """
        self.pool.check_invariants()
        users = [0] * self.pool.num_pages
        for page in (page for table in self._tables.values() for page in table.pages):
            users[page] += 1
        assert users == self._num_users, "users of window pages are off"
        evictable = {*self._behind, *self._kept}
        assert len(evictable) == self.num_evictable, "a window page is in two queues"
        assert evictable == {page for page in self._full_of if not users[page]}, "an evictable window page is off"
        in_use = {page for page, count in enumerate(users) if count}
        assert len(in_use) == self.num_pinned, "window page counts are off: free + evictable + pinned == usable"
        assert {page: full for full, page in enumerate(self.beside.tolist()) if page} == self._full_of
        assert ends.keys() <= self._tables.keys(), "a request without a window table"
        for request_id, (num_computed, num_full_pages) in ends.items():
            table = self._tables[request_id]
            assert table.first <= self.first_reached(num_computed), "a window page is gone that may still be read"
            assert table.first <= table.num_sent <= table.end, "a window table was told wrongly"
            assert table.num_promised == self.num_wanted(num_full_pages), "a promise is off"
        assert self.num_promised == sum(table.num_promised for table in self._tables.values()), "promises are off"
        num_ahead = self.pool.num_usable - self._capacity
        assert self.is_ample or self.num_pinned <= self.num_promised + num_ahead, "more is held than was promised"
        assert self.num_left >= 0, "more window pages are promised than there are"
