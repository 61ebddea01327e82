"""The interface of a prefix cache to the KV manager, and a cache that keeps nothing (`--no-enable-prefix-caching`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.engine.kv.events import KVEventLog
from tokenmill.engine.kv.radix_node import PageArray, RadixNode
from tokenmill.engine.kv.radix_tree import PrefixMatch

_NOTHING = np.empty(0, dtype=np.int32)


class PrefixCache(Protocol):
    """Prefix cache of the KV manager; `RadixTree` implements it and documents each method."""

    keeps_pages: bool
    events: KVEventLog | None
    num_pinned: int
    num_evictable: int

    def match(self, key: CacheKey, tokens: TokenArray, step: int) -> PrefixMatch:
        """Find the longest cached prefix."""

    def peek(self, key: CacheKey, tokens: TokenArray) -> int:
        """Return how many tokens `match` would find."""

    def has_page(self, node: RadixNode, tokens: TokenArray) -> bool:
        """Return True if the first page of `tokens` stands below a node."""

    def extend(self, node: RadixNode, tokens: TokenArray, pages: PageArray) -> tuple[RadixNode, PageArray]:
        """Take over full pages below a locked node; return the new deepest node and the pages not taken."""

    def replace(self, node: RadixNode, pages: PageArray) -> tuple[list[int], list[int]]:
        """Replace the pages of a node by other pages of the same content."""

    def lock(self, node: RadixNode) -> None:
        """Pin a path."""

    def unlock(self, node: RadixNode, step: int) -> None:
        """Unpin a path."""

    def num_unlocked_by(self, nodes: Iterable[RadixNode]) -> int:
        """Return how many pages on the paths to locked nodes would be evictable without one lock of each."""

    def evict(self, count: int) -> list[int]:
        """Give up pages."""

    def nodes(self, most: int | None = None) -> list[RadixNode]:
        """Return all nodes that hold pages, or about `most` of them."""

    def check_invariants(self) -> None:
        """Raise AssertionError if the bookkeeping is off."""


class NullCache:
    """Matches nothing and keeps nothing: every page stays its request's own."""

    def __init__(self, page_size: int) -> None:
        self.keeps_pages = False
        self.events: KVEventLog | None = None
        self.num_pinned = 0
        self.num_evictable = 0
        self._root = RadixNode(None, _NOTHING, _NOTHING, page_size, serial=0)

    def match(self, key: CacheKey, tokens: TokenArray, step: int) -> PrefixMatch:
        """Match nothing."""
        return PrefixMatch(self._root, _NOTHING, 0)

    def peek(self, key: CacheKey, tokens: TokenArray) -> int:
        """Return 0."""
        return 0

    def has_page(self, node: RadixNode, tokens: TokenArray) -> bool:
        """Return False."""
        return False

    def extend(self, node: RadixNode, tokens: TokenArray, pages: PageArray) -> tuple[RadixNode, PageArray]:
        """Refuse all pages as if they were duplicates: they stay the request's own."""
        return node, pages

    def replace(self, node: RadixNode, pages: PageArray) -> tuple[list[int], list[int]]:
        """Replace nothing."""
        return [], []

    def lock(self, node: RadixNode) -> None:
        """Count the users of the root."""
        node.locks += 1

    def unlock(self, node: RadixNode, step: int) -> None:
        """Undo one `lock`."""
        node.locks -= 1

    def num_unlocked_by(self, nodes: Iterable[RadixNode]) -> int:
        """Return 0."""
        return 0

    def evict(self, count: int) -> list[int]:
        """Evict nothing; `count` must be 0."""
        assert count == 0, "evicting from an empty cache"
        return []

    def nodes(self, most: int | None = None) -> list[RadixNode]:
        """Return no nodes."""
        return []

    def check_invariants(self) -> None:
        """Raise AssertionError if the root was unlocked more often than locked."""
        assert self._root.locks >= 0, "unlocked too often"
