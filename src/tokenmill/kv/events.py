"""KV events: what the prefix cache has taken in and given up, for routers that send a prompt where its prefix is.

A page is named by a hash of its tokens, of all tokens before them and of its cache key, so that two engines give the
same prefix the same name. The names are for others only: nothing here decides by them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.kv.radix_node import PageArray


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages became matchable.

    Attributes:
        hashes: their names, in order.
        parent_hash: name of the page before the first; None: they begin a sequence.
        token_ids: the tokens of all of them.
    """

    hashes: list[int]
    parent_hash: int | None
    token_ids: list[int]
    page_size: int


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages were evicted."""

    hashes: list[int]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All pages are gone."""


KVEvent = PagesStored | PagesRemoved | CacheCleared


class KVEventLog:
    """Collects events until they are taken. The prefix cache tells it what happens to its pages."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._hashes: dict[int, int] = {}

    def stored(self, key: CacheKey, parent_page: int | None, tokens: TokenArray, pages: PageArray) -> None:
        """`pages` with their `tokens` follow `parent_page`."""
        size = len(tokens) // len(pages)
        parent_hash = None if parent_page is None else self._hashes[parent_page]
        previous = _digest("/".join(key).encode()) if parent_hash is None else parent_hash
        hashes = []
        for number, page in enumerate(pages.tolist()):
            own = tokens[number * size : (number + 1) * size].tobytes()
            previous = self._hashes[page] = _digest(b"%d " % previous + own)
            hashes.append(previous)
        self._events.append(PagesStored(hashes, parent_hash, tokens.tolist(), size))

    def removed(self, pages: Iterable[int]) -> None:
        """`pages` were evicted."""
        hashes = [self._hashes.pop(page) for page in pages]
        if hashes:
            self._events.append(PagesRemoved(hashes))

    def cleared(self) -> None:
        """Everything was evicted, page by page."""
        self._events.append(CacheCleared())

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
