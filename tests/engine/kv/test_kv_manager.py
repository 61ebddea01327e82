"""Track the owners of pages: what is taken, what is kept for others, what comes back in which order."""

from __future__ import annotations

import pytest

from tokenmill.core.request import Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.kv.events import CacheCleared, KVEventLog
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.page_pool import PagePool
from tokenmill.engine.kv.radix_tree import RadixTree

PAGE_SIZE = 4


def make_manager(num_pages: int) -> KVManager:
    return KVManager(PagePool(num_pages + 1), RadixTree(PAGE_SIZE, KVEventLog()), PAGE_SIZE)


def make_request(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams(), arrival=0, max_tokens_total=len(tokens) + 1)


def acquire(kv: KVManager, request: Request, spare: int = 0) -> bool:
    return kv.acquire(request, kv.match(request, 1), request.num_tokens, 1, spare)


def state(kv: KVManager) -> tuple[int, int, int]:
    kv.check_invariants()
    return kv.pool.num_free, kv.cache.num_evictable, kv.num_pinned


def test_a_request_holds_the_pages_of_its_tokens_and_no_more() -> None:
    kv = make_manager(8)
    for length, pages in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        request = make_request("a", [7] * length)
        assert acquire(kv, request)
        assert kv.pages(request) == list(range(1, pages + 1))
        kv.release(request, 1)
    assert state(kv) == (8, 0, 0)


@pytest.mark.parametrize("spare", [0, 2])
def test_what_others_must_find_is_left_to_them_and_not_a_page_more(spare: int) -> None:
    kv = make_manager(5 + spare)
    first, second = make_request("first", [1] * 12), make_request("second", [2] * 8)
    assert acquire(kv, first, spare)
    before = state(kv)
    assert not acquire(kv, second, spare + 1)
    assert kv.allocate(first, 20, spare + 1) is None
    assert state(kv) == before, "a failed allocation changes nothing"
    assert kv.allocate(first, 20, spare) == [4, 5]
    assert kv.num_available == spare
    assert kv.allocate(first, 20, spare + 1) == [], "it lacks nothing, whatever others claim"


def test_a_request_gets_the_pages_it_lacks() -> None:
    kv = make_manager(5)
    request = make_request("a", [1] * 6)
    acquire(kv, request)
    assert [kv.num_missing_pages(request, tokens) for tokens in (1, 8, 9, 17)] == [0, 0, 1, 3]
    assert kv.allocate(request, 8, spare=0) == []
    assert kv.allocate(request, 9, spare=0) == [3]
    assert kv.pages(request) == [1, 2, 3]


def test_pages_that_a_match_found_are_not_evicted_to_make_room_for_the_rest() -> None:
    kv = make_manager(3)
    first = make_request("first", [1] * 8)
    acquire(kv, first)
    kv.cache_full_pages(first, 8, 1)
    kv.release(first, 1)
    assert state(kv) == (1, 2, 0)
    longer = make_request("longer", [1] * 16)
    assert not acquire(kv, longer), "two pages are its own prefix; of the other two it needs, one is there"
    assert state(kv) == (1, 2, 0)
    second = make_request("second", [1] * 12)
    assert acquire(kv, second)
    assert state(kv) == (0, 0, 3)


def test_its_own_pages_come_back_tail_first_so_that_the_head_is_used_again_first() -> None:
    kv = make_manager(4)
    request = make_request("a", [1] * 16)
    acquire(kv, request)
    kv.release(request, 1)
    assert kv.pool.allocate(4) == [1, 2, 3, 4]


def test_duplicates_come_back_too_tail_first() -> None:
    kv = make_manager(8)
    twins = [make_request(name, [1, 2, 3, 4, 5, 6, 7, 8, 9]) for name in "ab"]
    for twin in twins:
        acquire(kv, twin)
    for twin in twins:
        kv.cache_full_pages(twin, 9, 1)
    assert kv.pages(twins[1]) == [4, 5, 6], "a page table is append-only: what the tree holds twice is not swapped in"
    kv.release(twins[1], 1)
    assert kv.pool.allocate(3) == [4, 5, 6]
    kv.pool.free([6, 5, 4])
    kv.release(twins[0], 1)
    assert state(kv) == (6, 2, 0)


def test_the_cache_is_cleared_only_when_nobody_holds_pages_and_says_so() -> None:
    kv = make_manager(4)
    request = make_request("a", [1] * 9)
    acquire(kv, request)
    kv.cache_full_pages(request, 9, 1)
    assert not kv.clear_cache()
    kv.release(request, 1)
    assert state(kv) == (2, 2, 0)
    assert kv.clear_cache()
    assert state(kv) == (4, 0, 0)
    assert kv.cache.events is not None
    assert isinstance(kv.cache.events.take_events()[-1], CacheCleared)


def test_the_tree_takes_copies_for_pages_that_nobody_else_holds() -> None:
    kv = make_manager(10)
    moved: list[tuple[list[int], list[int]]] = []
    kv.on_replaced.append(lambda old, new: moved.append((old, new)))
    first, again = make_request("first", [1] * 8), make_request("again", [1] * 16)
    acquire(kv, first)
    kv.cache_full_pages(first, 8, 1)
    # As one whose recurrent state was not kept: it begins before what the tree has.
    assert kv.acquire(again, kv.cache.match(again.cache_key, again.token_ids[:0], 2), 16, 2, spare=0)
    kv.cache_full_pages(again, 8, 2)
    assert moved == [], "the first one uses the tree's"
    assert state(kv) == (4, 0, 6)
    kv.release(first, 3)
    assert state(kv) == (4, 0, 6), "and now nobody does"
    assert kv.give_copies([again])
    assert moved == [([1, 2], [3, 4])]
    assert state(kv) == (6, 0, 4)
    assert kv.pages(again) == [3, 4, 5, 6], "a page table is append-only"
    assert not kv.give_copies([again])
    kv.cache_full_pages(again, 16, 4)
    kv.release(again, 4)
    assert kv.match(make_request("more", [1] * 17), 5).pages.tolist() == [3, 4, 5, 6]
    assert kv.clear_cache()
    events = kv.cache.events
    assert isinstance(events, KVEventLog) and events.names() == [], "of moved pages the names are as they were"


def test_a_copy_that_a_full_page_makes_of_what_nobody_holds_is_the_tree_s_at_once() -> None:
    kv = make_manager(10)
    kv.on_replaced.append(lambda old, new: None)
    first, again = make_request("first", [1] * 16), make_request("again", [1] * 8 + [2] * 8)
    acquire(kv, first)
    kv.cache_full_pages(first, 16, 1)
    kv.release(first, 1)
    assert kv.acquire(again, kv.cache.match(again.cache_key, again.token_ids[:0], 2), 16, 2, spare=0)
    kv.cache_full_pages(again, 4, 2)
    assert state(kv) == (3, 3, 4)
    kv.cache_full_pages(again, 16, 3)
    assert state(kv) == (4, 2, 4), "the two pages that the first one goes on with are as they were"
