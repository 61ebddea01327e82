"""A consumer's threads: what they fetch, what they renew, and how they end."""

import itertools
import threading
import time

import numpy as np
import pytest

from tests.engine.transfer.remote.pair import (
    KEY,
    PAGE_SIZE,
    SECRET,
    Pair,
    running_pair,
    same_pages,
    soon,
    storing,
    zero_pages,
)
from tests.eventually import eventually
from tokenmill.engine.transfer.host_pages import HostPages
from tokenmill.engine.transfer.remote import links
from tokenmill.engine.transfer.remote.channel import TransferError
from tokenmill.engine.transfer.remote.client import PageClient
from tokenmill.engine.transfer.remote.links import Fetch, PageLink, PageLinks
from tokenmill.engine.transfer.remote.messages import Handle
from tokenmill.ipc.address import Address

HANDLE = Handle("engine-1", "request-1", "nonce")


class Told:
    """The outcomes of fetches."""

    def __init__(self) -> None:
        self.whys: list[str] = []
        self._said = threading.Condition()

    def __call__(self, why: str) -> None:
        with self._said:
            self.whys.append(why)
            self._said.notify()

    def wait(self, count: int) -> list[str]:
        with self._said:
            assert self._said.wait_for(lambda: len(self.whys) >= count, 30), self.whys
            return self.whys


@pytest.fixture
def pair(rng, tmp_path):
    with running_pair(rng, "stream", tmp_path, seconds=1.0, most_seconds=60.0) as running:
        yield running


@pytest.fixture
def link(pair):
    made = PageLink(pair.connect, pair.memory.page_bytes)
    yield made
    made.close()
    assert not made._thread.is_alive()


def fetch_of(tokens: np.ndarray, count: int, store, told: Told, **fields) -> Fetch:
    given = {"first": 0, "deadline": soon(), "is_wanted": lambda: True, "handle": HANDLE} | fields
    return Fetch(key=KEY, tokens=tokens, page_size=PAGE_SIZE, count=count, store=store, done=told, **given)


def held(pair: Pair, rng: np.random.Generator, count: int) -> tuple[list[int], np.ndarray]:
    pages = [int(page) for page in rng.permutation(40)[:count]]
    tokens = rng.integers(0, 1 << 20, count * PAGE_SIZE).astype(np.int32)
    pair.grant(HANDLE, pages, tokens)
    return pages, tokens


def test_pages_are_fetched_a_few_at_a_time(pair, link, rng, monkeypatch):
    link._ask_pages = 4
    pages, tokens = held(pair, rng, 11)
    ours, taken, told = zero_pages(pair.parts, 20), [], Told()
    own = list(range(3, 12))
    link.fetch(fetch_of(tokens, 9, storing(HostPages(ours), own, taken), told, first=2))
    assert told.wait(1) == [""]
    assert taken == own
    assert same_pages(pair.parts, pages[2:], ours, own)


class Renewals:
    """The leases of a pair on a clock that goes on only when one has been renewed."""

    def __init__(self, pair: Pair) -> None:
        self.leases = pair.leases
        self.now = 0.0
        self.num_renewed = 0
        self._renew = pair.leases.renew
        pair.leases._clock = lambda: self.now
        pair.leases.renew = self.renew

    def renew(self, handles) -> None:
        self._renew(handles)
        self.num_renewed += 1

    def outlast(self, seconds: float) -> None:
        """Let much more time pass than a lease has, with a renewal in each part of it; it must not end."""
        end = self.now + seconds
        while self.now < end:
            seen = self.num_renewed
            eventually(lambda seen=seen: self.num_renewed > seen)
            self.now += 0.6 * self.leases.seconds
            assert self.leases.take_ended() == []


def test_leases_are_renewed_while_requests_wait(pair, link, rng):
    renewals = Renewals(pair)
    held(pair, rng, 2)
    link.hold(HANDLE)
    renewals.outlast(2.5)
    link.drop(HANDLE)
    eventually(lambda: pair.leases.take_ended() == [0])


def test_a_lease_is_renewed_over_a_connection_that_was_idle(pair, link, rng):
    renewals = Renewals(pair)
    _, tokens = held(pair, rng, 1)
    told = Told()
    link.fetch(fetch_of(tokens, 1, storing(HostPages(zero_pages(pair.parts, 1)), [0]), told))
    assert told.wait(1) == [""]
    link.hold(HANDLE)
    renewals.outlast(2.5)


def test_what_nobody_renews_ends(pair, link, rng):
    """The consumer's thread lives, but nothing here wants these pages."""
    held(pair, rng, 2)
    eventually(lambda: pair.leases.take_ended() == [0])


def test_each_fetch_is_told_of_once_and_an_error_ends_only_its_own(pair, link, rng):
    _, tokens = held(pair, rng, 4)
    memory, told = HostPages(zero_pages(pair.parts, 4)), Told()

    def damaged(*_) -> None:
        raise TransferError("page 0 is damaged")

    store = storing(memory, [0, 1, 2, 3])
    link.fetch(fetch_of(tokens, 4, store, told, handle=Handle("engine-1", "request-1", "guess")))
    link.fetch(fetch_of(tokens, 4, damaged, told))
    link.fetch(fetch_of(tokens, 4, store, told, deadline=0.0))
    link.fetch(fetch_of(tokens, 4, store, told, is_wanted=lambda: False))
    link.fetch(fetch_of(tokens, 4, store, told))
    whys = told.wait(5)
    assert "no pages are held under this handle" in whys[0]
    assert whys[1] == "page 0 is damaged"
    assert whys[2] == whys[3] == "they did not come in time"
    assert whys[4] == ""
    assert len(pair.clients) == 2  # only what is damaged costs a connection


def test_a_dead_producer_is_left_alone_for_a_while(monkeypatch):
    monkeypatch.setattr(links, "BACKOFF_SECONDS", 0.2)
    tried, told = [], Told()

    def connect() -> PageClient:
        tried.append(time.monotonic())
        raise TransferError("nobody there")

    link = PageLink(connect, 100)
    try:
        tokens = np.zeros(PAGE_SIZE, np.int32)
        for _ in range(20):
            link.fetch(fetch_of(tokens, 1, None, told))
        assert told.wait(20) == ["nobody there"] * 20
        assert len(tried) <= 3
        link.hold(HANDLE)  # it is tried again, for the leases' sake, and not in every moment
        eventually(lambda: len(tried) >= 5)
        assert all(later - sooner >= 0.15 for sooner, later in itertools.pairwise(tried))
    finally:
        link.close()


def test_a_link_finds_a_producer_that_has_come_back(pair, link, rng, tmp_path, monkeypatch):
    monkeypatch.setattr(links, "BACKOFF_SECONDS", 0.05)
    _, tokens = held(pair, rng, 4)
    told, store = Told(), storing(HostPages(zero_pages(pair.parts, 4)), [0, 1, 2, 3])
    link.fetch(fetch_of(tokens, 4, store, told))
    assert told.wait(1) == [""]
    for channel in list(pair.server._channels):
        channel.close()
    link.fetch(fetch_of(tokens, 4, store, told))
    assert told.wait(2)[1] != ""
    time.sleep(0.1)
    pair.leases.renew([HANDLE])
    link.fetch(fetch_of(tokens, 4, store, told))
    assert told.wait(3)[2] == ""


def test_no_address_but_those_of_peers_is_ever_connected_to(pair):
    peers = PageLinks([Address("unix:/a"), Address("10.0.0.1", 5)], lambda _: None, 100)
    assert Address("unix:/a") in peers and Address("10.0.0.1", 5) in peers
    assert Address("10.0.0.1", 6) not in peers and Address("unix:/b") not in peers
    with pytest.raises(AssertionError):
        peers.to(Address("10.0.0.1", 6))


def test_a_link_closes_what_it_has_no_use_for(pair, rng, monkeypatch):
    monkeypatch.setattr(links, "QUIET_SECONDS", 0.2)
    address = pair.server.address
    link = PageLink(lambda: PageClient(address, SECRET, pair.format, "stream"), pair.memory.page_bytes)
    try:
        _, tokens = held(pair, rng, 1)
        told = Told()
        link.fetch(fetch_of(tokens, 1, storing(HostPages(zero_pages(pair.parts, 1)), [0]), told))
        assert told.wait(1) == [""]
        eventually(lambda: not pair.server._channels)
    finally:
        link.close()
