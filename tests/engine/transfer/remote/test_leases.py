"""The table of leases, on a clock that the test turns."""

import numpy as np
import pytest

from tests.engine.transfer.remote.pair import KEY, PAGE_SIZE
from tokenmill.core.request import CacheKey
from tokenmill.engine.transfer.remote.leases import Lease, LeaseRefused, LeaseTable, prefix_digest
from tokenmill.engine.transfer.remote.messages import OF_STATES, OF_WINDOWS, Handle

TOKENS = np.arange(3 * PAGE_SIZE, dtype=np.int32)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def handle(number: int) -> Handle:
    return Handle("engine", f"request-{number}", "nonce")


def lease(number: int) -> Lease:
    return Lease(number, handle(number), [4, 2, 9], KEY, TOKENS)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return LeaseTable(10.0, 25.0, clock)


def test_a_lease_ends_when_nobody_renews_it(table, clock):
    table.grant(lease(1))
    clock.now = 5.0
    table.grant(lease(2))
    clock.now = 9.9
    assert table.take_ended() == []
    clock.now = 10.0
    assert table.take_ended() == [1]
    assert table.take_ended() == []
    with pytest.raises(LeaseRefused, match="no pages are held"):
        table.find(handle(1))


def test_renewals_do_not_depend_on_the_order_of_grants(table, clock):
    """The first to be granted may be the last to end."""
    for number in range(1, 5):
        table.grant(lease(number))
    clock.now = 8.0
    table.renew([handle(1), handle(3), handle(99)])
    clock.now = 10.0
    assert table.take_ended() == [2, 4]
    clock.now = 16.0
    table.find(handle(3))
    clock.now = 18.0
    assert table.take_ended() == [1]
    clock.now = 25.0
    assert table.take_ended() == [3]  # 16 + 10 comes after its last moment


def test_a_lease_that_is_renewed_for_ever_ends_all_the_same(table, clock):
    table.grant(lease(1))
    while not (ended := table.take_ended()):
        clock.now += 1.0
        table.renew([handle(1)])
    assert ended == [1] and clock.now == 25.0


def test_a_finished_lease_ends_at_once_and_only_once(table, clock):
    table.grant(lease(1))
    table.end_lease(handle(1))
    table.end_lease(handle(1))
    table.end_lease(handle(7))
    assert table.take_ended() == [1]
    clock.now = 100.0
    assert table.take_ended() == [] and len(table) == 0


def test_a_handle_may_come_again_after_its_lease_has_ended(table, clock):
    table.grant(lease(1))
    table.end_lease(handle(1))
    assert table.take_ended() == [1]
    clock.now = 9.0
    table.grant(Lease(8, handle(1), [1], KEY, TOKENS[:PAGE_SIZE]))
    clock.now = 11.0  # when the first one would have ended
    assert table.take_ended() == []
    clock.now = 19.0
    assert table.take_ended() == [8]


def test_what_is_withdrawn_is_read_no_more_and_not_told_of(table):
    granted = lease(1)
    table.grant(granted)
    assert granted.read(1, 2, list) == [2, 9]
    table.withdraw(1)
    table.withdraw(1)
    with pytest.raises(LeaseRefused, match="not held any longer"):
        granted.read(1, 2, list)
    assert table.take_ended() == []


def test_a_digest_is_of_the_tokens_and_of_whom_they_belong_to():
    found = {
        prefix_digest(key, tokens)
        for key in (KEY, CacheKey("a model", ""), CacheKey("", "a modela salt"), CacheKey("a modela", " salt"))
        for tokens in (TOKENS, TOKENS[:-1], TOKENS + 1)
    }
    assert len(found) == 12


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 4), (3, 1), (2, 2), (1 << 31, 1)])
def test_no_more_pages_are_given_than_are_held(first, count):
    with pytest.raises(LeaseRefused, match="3 are held"):
        lease(1).check(b"", first, count)


def test_pages_of_windows_are_given_where_they_are_held(table):
    held = Lease(1, handle(1), [4, 2, 9], KEY, TOKENS, {OF_WINDOWS: {1: 7, 2: 5}, OF_STATES: {2: 0}})
    table.grant(held)
    held.check(prefix_digest(KEY, TOKENS), 1, 2, kind=OF_WINDOWS)
    assert held.read(1, 2, list, kind=OF_WINDOWS) == [7, 5]
    held.check(prefix_digest(KEY, TOKENS), 2, 1, kind=OF_STATES)
    assert held.read(2, 1, list, kind=OF_STATES) == [0]
    with pytest.raises(LeaseRefused, match="those of states are not held"):
        held.check(prefix_digest(KEY, TOKENS[: 2 * PAGE_SIZE]), 1, 1, kind=OF_STATES)
    assert held.read(1, 2, list) == [2, 9]
    with pytest.raises(LeaseRefused, match="those of windows are not held"):
        held.check(prefix_digest(KEY, TOKENS), 0, 3, kind=OF_WINDOWS)
    with pytest.raises(LeaseRefused, match="another prompt"):
        held.check(prefix_digest(CacheKey("", ""), TOKENS), 1, 2, kind=OF_WINDOWS)
    with pytest.raises(LeaseRefused, match="another prompt"):
        held.check(prefix_digest(KEY, TOKENS[: 2 * PAGE_SIZE]), 1, 2, kind=OF_WINDOWS)
    held.end()
    with pytest.raises(LeaseRefused, match="not held any longer"):
        held.read(1, 2, list, kind=OF_WINDOWS)
