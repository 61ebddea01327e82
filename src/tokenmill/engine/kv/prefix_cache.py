"""What the KV manager asks of a prefix cache, and the cache that never has anything (`--no-enable-prefix-caching`)."""

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
    """See `RadixTree`, which implements it, for the meaning of each method."""

    keeps_pages: bool
    events: KVEventLog | None
    num_pinned: int
    num_evictable: int

    def match(self, key: CacheKey, tokens: TokenArray, step: int) -> PrefixMatch:
        """Find the longest cached prefix."""

    def peek(self, key: CacheKey, tokens: TokenArray) -> int:
        """How many tokens would be found."""

    def has_page(self, node: RadixNode, tokens: TokenArray) -> bool:
        """True if the first page of `tokens` stands below a node."""

    def extend(self, node: RadixNode, tokens: TokenArray, pages: PageArray) -> tuple[RadixNode, PageArray]:
        """Take over full pages below a locked node; returns the new deepest node and the pages not taken."""

    def replace(self, node: RadixNode, pages: PageArray) -> tuple[list[int], list[int]]:
        """Take other pages of the same content for those of a node."""

    def lock(self, node: RadixNode) -> None:
        """Pin a path."""

    def unlock(self, node: RadixNode, step: int) -> None:
        """Unpin a path."""

    def num_unlocked_by(self, nodes: Iterable[RadixNode]) -> int:
        """Pages of the paths to locked nodes that would be evictable without one lock of each."""

    def evict(self, count: int) -> list[int]:
        """Give up pages."""

    def nodes(self, most: int | None = None) -> list[RadixNode]:
        """All nodes that hold pages, or about as many of them."""

    def check_invariants(self) -> None:
        """Raise AssertionError where the bookkeeping is off."""


class NullCache:
    """Matches nothing and keeps nothing: every page stays its request's own."""

    def __init__(self, page_size: int) -> None:
        self.keeps_pages = False
        self.events: KVEventLog | None = None
        self.num_pinned = 0
        self.num_evictable = 0
        self._root = RadixNode(None, _NOTHING, _NOTHING, page_size, serial=0)

    def match(self, key: CacheKey, tokens: TokenArray, step: int) -> PrefixMatch:
        """No prefix is ever cached."""
        return PrefixMatch(self._root, _NOTHING, 0)

    def peek(self, key: CacheKey, tokens: TokenArray) -> int:
        """Nothing."""
        return 0

    def has_page(self, node: RadixNode, tokens: TokenArray) -> bool:
        """No page stands anywhere."""
        return False

    def extend(self, node: RadixNode, tokens: TokenArray, pages: PageArray) -> tuple[RadixNode, PageArray]:
        """Refuse all pages, as if they were duplicates: they stay the request's own."""
        return node, pages

    def replace(self, node: RadixNode, pages: PageArray) -> tuple[list[int], list[int]]:
        """There are no pages."""
        return [], []

    def lock(self, node: RadixNode) -> None:
        """Count the users of the root."""
        node.locks += 1

    def unlock(self, node: RadixNode, step: int) -> None:
        """Undo `lock`."""
        node.locks -= 1

    def num_unlocked_by(self, nodes: Iterable[RadixNode]) -> int:
        """There are no pages."""
        return 0

    def evict(self, count: int) -> list[int]:
        """There is nothing to evict."""
        assert count == 0, "evicting from an empty cache"
        return []

    def nodes(self, most: int | None = None) -> list[RadixNode]:
        """No node holds pages."""
        return []

    def check_invariants(self) -> None:
        """The root is never unlocked more often than locked."""
        assert self._root.locks >= 0, "unlocked too often"
