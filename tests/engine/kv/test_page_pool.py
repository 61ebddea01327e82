"""The pool of page ids: which are given out, in which order, and what is refused."""

from __future__ import annotations

import pytest

from tokenmill.engine.kv.page_pool import PagePool


def test_every_page_but_the_reserved_one_can_be_allocated_lowest_first() -> None:
    pool = PagePool(6)
    assert (pool.num_usable, pool.num_free) == (5, 5)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(0) == []
    assert pool.num_free == 3
    assert pool.allocate(3) == [3, 4, 5]
    assert (pool.num_usable, pool.num_free) == (5, 0)
    pool.check_invariants()


def test_what_is_freed_last_is_allocated_first() -> None:
    pool = PagePool(6)
    pool.allocate(5)
    pool.free([4, 2])
    pool.free([5])
    pool.check_invariants()
    assert pool.allocate(3) == [5, 2, 4]


def test_the_smallest_pool_has_one_page_to_give() -> None:
    pool = PagePool(2)
    assert pool.allocate(1) == [1]
    pool.free([1])
    pool.check_invariants()


@pytest.mark.parametrize("page", [0, 1, 3, 6, -1])
def test_a_page_that_is_not_allocated_cannot_be_freed(page: int) -> None:
    pool = PagePool(6)
    pool.allocate(3)
    pool.free([1, 3])
    with pytest.raises(AssertionError, match=f"page {page} is not allocated"):
        pool.free([page])


def test_more_than_there_is_cannot_be_allocated() -> None:
    pool = PagePool(4)
    with pytest.raises(AssertionError, match="allocating 4 of 3 free pages"):
        pool.allocate(4)
    assert pool.allocate(3) == [1, 2, 3]
