"""Leases: pages that a producer holds after a request has ended, until a consumer has them or stops renewing.

    grant ──> held ──(renew, or a read)──> held ──(finish, or time is up)──> taken by `take_ended`

Time is judged here and nowhere else: to the scheduler the end of a lease is an event. A page is copied out under the
lock of its lease, a few at a time, so once a lease has ended no byte of its pages is looked at any more.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.engine.transfer.remote.messages import Handle

DIGEST_BYTES = 16


def prefix_digest(key: CacheKey, tokens: TokenArray) -> bytes:
    """Return a digest of tokens and their cache key, [DIGEST_BYTES]. A peer that knows it has the same tokens."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in key:
        digest.update(len(part.encode()).to_bytes(4, "big") + part.encode())
    digest.update(tokens.tobytes())
    return digest.digest()


class LeaseRefused(Exception):
    """A handle gives no pages. Its text says why, in a sentence."""


class Lease:
    """Pages under a handle, and the tokens they hold. Any thread may read it.

    Attributes:
        id: the owner's id for it.
        ends: when it is over unless it is renewed; on the clock of its table.
        ends_at_last: when it is over even if it is renewed.
    """

    def __init__(
        self,
        id: int,
        handle: Handle,
        pages: Sequence[int],
        key: CacheKey,
        tokens: TokenArray,
        beside: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        """Hold pages.

        Args:
            pages: full ones, in order.
            tokens: of all of them.
            beside: by kind, `OF_WINDOWS` or `OF_STATES`, what belongs to a full page, by the number of that.
        """
        self.id = id
        self.handle = handle
        self.ends = self.ends_at_last = 0.0
        self._pages = pages
        self._key = key
        self._tokens = tokens
        self._beside = beside or {}
        self._lock = threading.Lock()
        self._is_over = False

    def check(self, prefix: bytes, first: int, count: int, kind: str = "") -> None:
        """Check that its pages are those that a consumer wants.

        Args:
            kind: what is wanted of them: "", `OF_WINDOWS` or `OF_STATES`.

        Raises:
            LeaseRefused: it has fewer pages, or they hold other tokens.
        """
        end = first + count
        if not 0 < count <= len(self._pages) - first:
            raise LeaseRefused(f"pages {first} to {end} were asked for; {len(self._pages)} are held")
        page_size = len(self._tokens) // len(self._pages)
        if prefix != prefix_digest(self._key, self._tokens[: end * page_size]):
            raise LeaseRefused("the pages under this handle are those of another prompt")
        if kind and not self._beside.get(kind, {}).keys() >= set(range(first, end)):
            raise LeaseRefused(f"of pages {first} to {end} those of {kind[1:]} are not held")

    def read(self, first: int, count: int, copy: Callable[[Sequence[int]], list[int]], kind: str = "") -> list[int]:
        """Let `copy` read some of its pages, or what is held beside them, and return the result of `copy`.

        Raises:
            LeaseRefused: it has ended.
        """
        with self._lock:
            if self._is_over:
                raise LeaseRefused("these pages are not held any longer")
            if kind:
                return copy([self._beside[kind][number] for number in range(first, first + count)])
            return copy(self._pages[first : first + count])

    def end(self) -> None:
        """End the lease. Its pages are not read any more when this returns."""
        with self._lock:
            self._is_over = True


class LeaseTable:
    """All leases of a producer. Any thread may call it; a call waits no longer than it takes to copy some pages.

    Attributes:
        seconds: how long a lease lasts without renewal.
        most_seconds: how long it lasts at most.
    """

    def __init__(self, seconds: float, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.most_seconds = most_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[Handle, Lease] = {}
        # (when to look at it, number, lease). One that was renewed is found out and put back when its time comes; the
        # number makes the order one of events, where times are equal.
        self._due: list[tuple[float, int, Lease]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        """Return the number of leases that have not been taken back yet."""
        return len(self._leases)

    def grant(self, lease: Lease) -> None:
        """Hold pages under a new handle."""
        now = self._clock()
        lease.ends, lease.ends_at_last = now + self.seconds, now + self.most_seconds
        with self._lock:
            assert lease.handle not in self._leases, "a nonce came twice"
            self._leases[lease.handle] = lease
            self._push(lease.ends, lease)

    def renew(self, handles: Iterable[Handle]) -> None:
        """Renew the leases of handles that a consumer waits for; ignore unknown ones."""
        ends = self._clock() + self.seconds
        with self._lock:
            for handle in handles:
                lease = self._leases.get(handle)
                if lease is not None:
                    lease.ends = min(ends, lease.ends_at_last)

    def end_lease(self, handle: Handle) -> None:
        """End the lease of a handle that is not wanted any more; ignore an unknown one."""
        with self._lock:
            lease = self._leases.get(handle)
            if lease is not None:
                lease.ends = 0.0
                self._push(0.0, lease)

    def find(self, handle: Handle) -> Lease:
        """Renew and return the lease of a handle.

        Raises:
            LeaseRefused: the handle has no lease, or no longer.
        """
        with self._lock:
            lease = self._leases.get(handle)
        if lease is None:
            raise LeaseRefused("no pages are held under this handle, or no longer")
        self.renew([handle])
        return lease

    def withdraw(self, lease_id: int) -> None:
        """End a lease now, as the owner wants its pages back."""
        with self._lock:
            lease = next((lease for lease in self._leases.values() if lease.id == lease_id), None)
            if lease is not None:
                del self._leases[lease.handle]
        if lease is not None:
            lease.end()

    def take_ended(self) -> list[int]:
        """Return the ids of leases that have ended since the last call, each once. Their pages are free now."""
        ended = []
        with self._lock:
            now = self._clock()
            while self._due and self._due[0][0] <= now:
                _, _, lease = heapq.heappop(self._due)
                if self._leases.get(lease.handle) is not lease:
                    continue
                if lease.ends > now:
                    self._push(lease.ends, lease)
                    continue
                del self._leases[lease.handle]
                ended.append(lease)
        for lease in ended:
            lease.end()
        return [lease.id for lease in ended]

    def _push(self, when: float, lease: Lease) -> None:
        self._num_pushed += 1
        heapq.heappush(self._due, (when, self._num_pushed, lease))
