"""KV events: pages that the prefix cache has stored and given up, for routers that send a prompt where its prefix is.

A page is called by its name (`core/page_names.py`), which is the same on every engine. The names are for routers only:
no code here decides by them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenmill.core.page_names import first_name, page_names
from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.engine.kv.radix_node import PageArray


class PagesStored(msgspec.Struct, frozen=True):
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


class PagesRemoved(msgspec.Struct, frozen=True):
    """Pages were evicted."""

    hashes: list[int]


class CacheCleared(msgspec.Struct, frozen=True):
    """All pages were evicted."""


KVEvent = PagesStored | PagesRemoved | CacheCleared


class KVEventLog:
    """Collects events until they are taken. The prefix cache tells it what happens to its pages."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._hashes: dict[int, int] = {}

    def stored(self, key: CacheKey, parent_page: int | None, tokens: TokenArray, pages: PageArray) -> None:
        """Record that `pages` with their `tokens` follow `parent_page`."""
        size = len(tokens) // len(pages)
        parent_hash = None if parent_page is None else self._hashes[parent_page]
        hashes = page_names(tokens, size, first_name(key) if parent_hash is None else parent_hash)
        self._hashes.update(zip(pages.tolist(), hashes, strict=True))
        self._events.append(PagesStored(hashes, parent_hash, tokens.tolist(), size))

    def removed(self, pages: Iterable[int]) -> None:
        """Record that `pages` were evicted."""
        hashes = [self._hashes.pop(page) for page in pages]
        if hashes:
            self._events.append(PagesRemoved(hashes))

    def replaced(self, old: Iterable[int], new: Iterable[int]) -> None:
        """Take in that pages have moved; their names stay the same."""
        for before, after in zip(old, new, strict=True):
            self._hashes[after] = self._hashes.pop(before)

    def cleared(self) -> None:
        """Record that the whole cache was evicted, page by page."""
        self._events.append(CacheCleared())

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def names(self) -> list[int]:
        """Return the names of all pages in the cache."""
        return list(self._hashes.values())


def changes_of(events: Iterable[KVEvent]) -> list[tuple[bool, list[int]]]:
    """Return the names of pages that came (True) or went, in order; see `EngineReport`."""
    return [(isinstance(event, PagesStored), event.hashes) for event in events if not isinstance(event, CacheCleared)]
