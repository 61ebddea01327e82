"""The window group: what goes behind a window and what stays, hits in both groups, who is evicted first, promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import scaled
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.page_pool import PagePool
from tokenmill.engine.kv.radix_tree import RadixTree
from tokenmill.engine.kv.window_pages import WindowPages, WindowSettings, most_window_pages
from tokenmill.engine.scheduler.resources.pages import Pages
from tokenmill.engine.scheduler.resources.resource import Resources
from tokenmill.engine.scheduler.resources.windows import Windows


class Windowed:
    """A KV manager with a window group, driven as the scheduler does, beside a memory of what each page holds."""

    def __init__(self, num_pages: int, num_windows: int, window: int, page_size: int, most_ahead: int) -> None:
        self.windows = WindowPages(WindowSettings(window, num_windows), page_size, num_pages + 1, most_ahead)
        self.kv = KVManager(PagePool(num_pages + 1), RadixTree(page_size), page_size)
        group = Windows(self.kv, self.windows)
        self.pages = Pages(self.kv, [group])
        self.resources = Resources([self.pages, group])
        self.page_size, self.window, self.most_ahead = page_size, window, most_ahead
        self.memory: dict[int, tuple[int, ...]] = {}  # window page -> the tokens up to the end of it
        self.tables: dict[str, dict[int, int]] = {}
        self.running: dict[str, Request] = {}
        self.num_requests = self.step = 0

    def begin(self, tokens: list[int], chunk: int | None = None) -> str | None:
        """Admit a request and run its first chunk; None: it does not fit. The hit is checked against plain search."""
        self.step += 1
        request = Request(
            str(self.num_requests), tokens, SamplingParams(), arrival=self.num_requests, max_tokens_total=1000
        )
        self.num_requests += 1
        match = self.resources.matched(request, self.kv.match(request, self.step), self.step)
        assert match.num_tokens == self.longest_hit(request), "not the longest hit in both groups"
        if self.resources.acquire_all(request, match, request.num_tokens, self.step):
            return None
        request.num_computed_tokens = match.num_tokens
        self.running[request.id], self.tables[request.id] = request, {}
        self.compute(request, chunk or request.num_tokens)
        return request.id

    def longest_hit(self, request: Request) -> int:
        """By plain search, from the longest on."""
        tokens = self.kv.matchable(request)
        pages = RadixTree.match(self.kv.cache, request.cache_key, tokens, self.step).pages.tolist()
        for count in range(len(pages), 0, -1):
            seen = range(max(0, count * self.page_size - self.window + 1), count * self.page_size)
            beside = [int(self.windows.beside[pages[position // self.page_size]]) for position in seen]
            if all(beside):
                for position, page in zip(seen, beside, strict=True):
                    end = (position // self.page_size + 1) * self.page_size
                    assert self.memory[page] == tuple(tokens[:end].tolist()), "a page in the tree holds something else"
                return count * self.page_size
        return 0

    def compute(self, request: Request, count: int) -> None:
        """Launch and commit a step of up to `count` tokens."""
        self.step += 1
        count = min(count, request.num_tokens - request.num_computed_tokens, max(self.most_ahead, 1))
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        first, pages = self.windows.cover(request.id, end)
        table = self.tables[request.id]
        table.update(enumerate(pages, first))
        tokens = request.token_ids[:end].tolist()
        for position in range(start, end):
            number = position // self.page_size
            self.memory[table[number]] = tuple(tokens[: (number + 1) * self.page_size])
        for position in range(max(0, start - self.window + 1), end):
            number = position // self.page_size
            assert self.memory[table[number]] == tuple(tokens[: (number + 1) * self.page_size]), "a window is torn"
        request.num_computed_tokens = end
        self.kv.cache_full_pages(request, end, self.step)
        self.windows.keep(request.id, end, True)

    def grow(self, index: int, tokens: list[int]) -> None:
        """One that runs gets further tokens and runs them, if there are pages."""
        request = self.pick(index)
        if request is not None and self.pages.grow(request, request.num_tokens + len(tokens)) is not None:
            if request.num_computed_tokens == request.num_tokens:
                request.append_outputs(tokens)
                request.num_pending_tokens = 0
            self.compute(request, len(tokens))

    def end(self, index: int) -> None:
        request = self.pick(index)
        if request is not None:
            self.step += 1
            del self.running[request.id], self.tables[request.id]
            self.resources.release_all(request, self.step)

    def pick(self, index: int) -> Request | None:
        return list(self.running.values())[index % len(self.running)] if self.running else None

    def check(self) -> None:
        self.kv.check_invariants()
        running = self.running.values()
        self.windows.check_invariants({r.id: (r.num_computed_tokens, len(self.kv.pages(r))) for r in running})


some_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=20)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), some_tokens, st.integers(1, 8)),
        st.tuples(st.just("grow"), st.integers(0, 9), st.lists(st.integers(0, 1), min_size=1, max_size=5)),
        st.tuples(st.just("end"), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(
    page_size=st.sampled_from([1, 2, 4]),
    window=st.integers(1, 10),
    num_pages=st.integers(8, 40),
    num_windows=st.integers(1, 2),
    is_ample=st.booleans(),
    operations=operations,
)
@settings(max_examples=scaled(120), deadline=None)
def test_hits_windows_and_counts_are_those_of_a_plain_search(
    page_size: int, window: int, num_pages: int, num_windows: int, is_ample: bool, operations: list[tuple]
) -> None:
    count = num_windows * most_window_pages(window, page_size) + 8 // page_size
    model = Windowed(num_pages, num_pages if is_ample else count, window, page_size, 8)
    for name, *arguments in operations:
        getattr(model, name)(*arguments)
        model.check()
    while model.running:
        model.end(0)
    model.check()
    assert model.windows.num_pinned == model.windows.num_promised == 0
    assert model.kv.clear_cache()
    assert model.windows.pool.num_free == model.windows.pool.num_usable
    assert not model.windows.beside.any()


def run_whole(model: Windowed, tokens: list[int]) -> str:
    name = model.begin(tokens, 4)
    assert name is not None
    request = model.running[name]
    while request.num_computed_tokens < request.num_tokens:
        model.compute(request, 4)
    return name


def in_table(model: Windowed, name: str) -> tuple[int, int]:
    table = model.windows._tables[name]
    return table.first, table.end


def test_what_lies_behind_a_window_goes_and_its_memory_returns() -> None:
    model = Windowed(100, 60, window=9, page_size=4, most_ahead=4)
    request_id = run_whole(model, list(range(80)))
    assert in_table(model, request_id) == (18, 20), "8 tokens before the end at 80 are in two pages"
    windows = model.windows
    assert (windows.pool.num_free, windows.num_evictable, windows.num_pinned) == (40, 18, 2)
    assert len(model.kv.pages(model.running[request_id])) == 20, "the other group keeps all"


@pytest.mark.parametrize(("window", "page_size", "pages"), [(1, 4, 2), (4, 4, 3), (5, 4, 3), (6, 4, 4), (1024, 16, 66)])
def test_a_request_promises_itself_its_window_and_two_pages(window: int, page_size: int, pages: int) -> None:
    assert most_window_pages(window, page_size) == pages


def test_what_was_found_and_where_requests_ended_goes_last() -> None:
    model = Windowed(100, 30, window=9, page_size=4, most_ahead=4)
    system, first = list(range(24)), [*range(24), *range(100, 140)]

    def num_found(tokens: list[int]) -> int:
        request_id = model.begin(tokens, 4)
        assert request_id is not None
        found = model.running[request_id].num_computed_tokens - 4
        model.end(0)
        return found

    run_whole(model, first)
    model.end(0)
    assert num_found([*system, *range(300, 340)]) == 24, "behind windows, but there is room for it still"
    run_whole(model, list(range(500, 620)))
    model.end(0)
    assert num_found([*system, *range(600, 640)]) == 24, "it has been found before"
    assert num_found([*first, 1, 2, 3, 4]) == 64, "here a request has ended"
    assert num_found([*first[:40], 1, 2, 3, 4]) == 24, "that nobody had looked for"


def test_who_needs_a_window_that_is_promised_to_others_waits_and_changes_nothing() -> None:
    model = Windowed(100, 5, window=9, page_size=4, most_ahead=4)
    assert model.windows.most_pages == 4
    first = model.begin([1] * 40, 4)
    assert first is not None
    assert model.windows.num_left == 0
    before = (model.kv.pool.num_free, model.windows.pool.num_free, model.windows.num_promised)
    assert model.begin([2] * 40, 4) is None
    assert (model.kv.pool.num_free, model.windows.pool.num_free, model.windows.num_promised) == before
    model.check()
    model.end(0)
    assert model.begin([2] * 40, 4) is not None


def test_a_short_request_promises_itself_no_more_than_it_has() -> None:
    model = Windowed(100, 5, window=9, page_size=4, most_ahead=4)
    for _ in range(4):
        assert model.begin([1, 2, 3]) is not None
    assert model.begin([1, 2, 3]) is None
    assert model.pages.grow(model.running["0"], 5) is None, "a second page would want a second window page"
    model.check()


def test_a_request_whose_window_never_fits_is_refused() -> None:
    model = Windowed(100, 4, window=9, page_size=4, most_ahead=4)
    request = Request("0", [1] * 9, SamplingParams(), arrival=0, max_tokens_total=40)
    with pytest.raises(InvalidRequest, match="a window needs 4 pages of the KV cache; it has 3 for it"):
        model.resources.check_all(request, 40)
    model.resources.check_all(request, 12)


def test_with_as_many_pages_as_the_full_group_nothing_is_promised() -> None:
    model = Windowed(12, 12, window=9, page_size=4, most_ahead=100)
    for number in range(4):
        assert model.begin([number] * 12, 100) is not None
    assert model.begin([5], 1) is None, "the full group is short"
    assert model.windows.num_promised == 0
    model.check()


def test_a_full_page_that_is_evicted_takes_its_window_page_with_it() -> None:
    model = Windowed(8, 8, window=9, page_size=4, most_ahead=8)
    run_whole(model, list(range(32)))
    model.end(0)
    assert model.windows.num_evictable == 8
    run_whole(model, list(range(100, 116)))
    model.check()
    assert np.count_nonzero(model.windows.beside) == 8
