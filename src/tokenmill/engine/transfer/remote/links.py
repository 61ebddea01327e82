"""The consumer's threads, one per producer: fetch pages in the order asked for, and renew leases meanwhile.

The engine's thread gives orders (`hold`, `fetch`, `drop`) and never waits for a producer. A fetch ends by its pages, by
an error, or by its deadline, and says so exactly once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.engine.transfer.remote.channel import PagesRefused, TransferError
from tokenmill.engine.transfer.remote.client import PageClient
from tokenmill.engine.transfer.remote.leases import prefix_digest
from tokenmill.engine.transfer.remote.messages import Ask, Handle
from tokenmill.engine.transfer.remote.transports import Store
from tokenmill.ipc.address import Address

logger = logging.getLogger(__name__)

# Bytes that are asked for at a time; between two of these, leases are renewed.
ASK_BYTES = 64 << 20
# A producer that could not be reached is left alone for so long; what needs it meanwhile fails at once.
BACKOFF_SECONDS = 1.0
# An idle connection is closed after this many seconds.
QUIET_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class Fetch:
    """An order for pages of a prompt that a producer has.

    Attributes:
        tokens: tokens of the prompt, at least up to the end of these pages.
        first: number of pages of the prompt before them.
        store: takes them in; raises TransferError if one is damaged, or if the pages are not wanted any more.
        deadline: on the monotonic clock.
        is_wanted: called before each `Ask`; False ends the fetch.
        done: called once at the end, from the link's thread, with why pages are missing; empty: all have come.
    """

    handle: Handle
    key: CacheKey
    tokens: TokenArray
    page_size: int
    first: int
    count: int
    store: Store
    deadline: float
    is_wanted: Callable[[], bool]
    done: Callable[[str], None]

    def ask(self, start: int, most: int) -> Ask:
        """Return the message that asks for the next pages, from page `start` of these on."""
        first, count = self.first + start, min(most, self.count - start)
        tokens = self.tokens[: (first + count) * self.page_size]
        return Ask(self.handle, prefix_digest(self.key, tokens), first, count)


class PageLink:
    """A connection to one producer, with a thread of its own."""

    def __init__(self, connect: Callable[[], PageClient], page_bytes: int) -> None:
        self._connect = connect
        self._ask_pages = max(1, ASK_BYTES // page_bytes)
        self._changed = threading.Condition()
        self._waiting: deque[Fetch] = deque()
        self._held: dict[Handle, None] = {}  # in order, unlike a set
        self._finished: list[Handle] = []
        self._is_closed = False
        self._client: PageClient | None = None
        self._failed_at = -BACKOFF_SECONDS
        self._failure = ""
        self._next_renewal = 0.0
        self._used_at = 0.0
        self._thread = threading.Thread(target=self._run, name="page-link", daemon=True)
        self._thread.start()

    def hold(self, handle: Handle) -> None:
        """Renew the lease of these pages until `drop`."""
        with self._changed:
            self._held[handle] = None
            self._changed.notify()

    def fetch(self, fetch: Fetch) -> None:
        """Queue a fetch behind the earlier ones."""
        with self._changed:
            self._waiting.append(fetch)
            self._changed.notify()

    def drop(self, handle: Handle) -> None:
        """Tell the producer that these pages are not wanted here any more."""
        with self._changed:
            self._held.pop(handle, None)
            self._finished.append(handle)
            self._changed.notify()

    def close(self) -> None:
        """End the thread; fetches that have not begun are dropped without a call of `done`."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                # Not `wait_for`: what is new may have to be looked at sooner than what was there before.
                if not self._has_work():
                    self._changed.wait(max(0.01, self._next_wake() - time.monotonic()))
                if self._is_closed:
                    break
                fetch = self._waiting.popleft() if self._waiting else None
                finished, self._finished = ([], self._finished) if fetch else (self._finished, [])
            if fetch is not None:
                fetch.done(self._fetch(fetch))
            self._keep_up(finished)
        if self._client is not None:
            self._client.close()

    def _has_work(self) -> bool:
        has_news = bool(self._held) and self._client is None and time.monotonic() > self._failed_at + BACKOFF_SECONDS
        return bool(self._waiting or self._finished or self._is_closed or has_news)

    def _next_wake(self) -> float:
        if self._held:
            return self._next_renewal if self._client is not None else self._failed_at + BACKOFF_SECONDS
        return self._used_at + QUIET_SECONDS if self._client is not None else time.monotonic() + QUIET_SECONDS

    def _fetch(self, fetch: Fetch) -> str:
        """Get all pages; return why that failed, or an empty string."""
        start = 0
        try:
            while start < fetch.count:
                if time.monotonic() >= fetch.deadline or not fetch.is_wanted():
                    raise PagesRefused("they did not come in time")
                ask = fetch.ask(start, self._ask_pages)
                self._connected().fetch(ask, _from(start, fetch.store), fetch.deadline)
                start += ask.count
                self._used_at = time.monotonic()
                self._renew()
        except PagesRefused as error:
            return str(error)
        except TransferError as error:
            self._disconnect()
            return str(error)
        return ""

    def _keep_up(self, finished: Sequence[Handle]) -> None:
        """Renew what is held, tell the producer what is not wanted any more, and end an idle connection."""
        try:
            for handle in finished:
                self._connected().release_pages(handle, time.monotonic() + BACKOFF_SECONDS)
                self._used_at = time.monotonic()
            self._renew()
        except TransferError as error:
            logger.info("leases are not renewed: %s", error)
            self._disconnect()
        if self._client is not None and not self._held and time.monotonic() >= self._used_at + QUIET_SECONDS:
            self._disconnect()

    def _renew(self) -> None:
        with self._changed:
            held = list(self._held)
        now = time.monotonic()
        if held and (self._client is None or now >= self._next_renewal):
            client = self._connected()
            client.renew(held, now + BACKOFF_SECONDS)
            self._next_renewal = now + client.lease_seconds / 3
            self._used_at = now

    def _connected(self) -> PageClient:
        if self._client is None:
            if time.monotonic() < self._failed_at + BACKOFF_SECONDS:
                raise TransferError(self._failure)
            try:
                self._client = self._connect()
            except TransferError as error:
                self._failed_at, self._failure = time.monotonic(), str(error)
                raise
            self._next_renewal, self._used_at = 0.0, time.monotonic()
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _from(start: int, store: Store) -> Store:
    """Return the same store for pages that are counted from page `start` on."""
    return lambda first, data, checksums: store(start + first, data, checksums)


class PageLinks:
    """The links to all producers that may be asked; a link is made when it is first used."""

    def __init__(self, peers: Sequence[Address], connect: Callable[[Address], PageClient], page_bytes: int) -> None:
        """`peers`: the only addresses that are ever connected to, whatever a client names."""
        self._peers = frozenset(peers)
        self._connect = connect
        self._page_bytes = page_bytes
        self._links: dict[Address, PageLink] = {}

    def __contains__(self, address: Address) -> bool:
        return address in self._peers

    def to(self, address: Address) -> PageLink:
        """Return the link to one of the peers."""
        assert address in self._peers, f"{address} is no peer"
        if address not in self._links:
            self._links[address] = PageLink(lambda: self._connect(address), self._page_bytes)
        return self._links[address]

    def close(self) -> None:
        """End all links."""
        for link in self._links.values():
            link.close()
