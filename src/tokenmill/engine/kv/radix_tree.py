"""The prefix cache: a radix tree over token ids at page granularity (after SGLang's RadixAttention, Zheng et al. 2024).

Compressed edges, split at the first page that differs; whole paths are locked by the requests that use them; leaves
are evicted as a policy says, tail pages before head pages, and a parent becomes a leaf when its last child
goes. Tokens are compared themselves, never a hash of them. Each cache key has a root of its own, so
models and tenants with different salts never share a page.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.engine.kv.events import KVEventLog
from tokenmill.engine.kv.eviction import EvictionPolicy
from tokenmill.engine.kv.radix_node import PageArray, RadixNode

_NOTHING = np.empty(0, dtype=np.int32)


class PrefixMatch(msgspec.Struct, frozen=True):
    """Longest cached prefix of a token sequence. `node` is its deepest node, to be locked before anything else.

    Attributes:
        num_tokens: of `pages`, and of the beginning of the next one that can be copied.
        longer: a longer match of the same tokens without a recurrent state at its end, or None.
        begins_as: where the next page begins as another one does that is cached: the node that this is the first page
            of, that page, and the one beside it in the window group; see `PageCopies`.
    """

    node: RadixNode
    pages: PageArray
    num_tokens: int
    longer: PrefixMatch | None = None
    begins_as: tuple[RadixNode, int, int] | None = None


class RadixTree:
    """Owns the pages of its edges. `num_pinned + num_evictable` is the number of pages it owns.

    Attributes:
        keeps_pages: False: nothing is ever found.
    """

    keeps_pages = True

    def __init__(self, page_size: int, events: KVEventLog | None = None, policy: EvictionPolicy | None = None) -> None:
        self.page_size = page_size
        self._policy = policy or EvictionPolicy()
        self.events = events
        self.num_pinned = 0
        self.num_evictable = 0
        self._roots: dict[CacheKey, RadixNode] = {}
        self._num_nodes = 0
        self._serials = itertools.count()
        # (rank, serial, node) of evictable leaves; an entry goes stale when its node is used, locked or removed.
        self._queue: list[tuple[Any, int, RadixNode]] = []

    def match(self, key: CacheKey, tokens: TokenArray, step: int) -> PrefixMatch:
        """Find the longest cached prefix of `tokens`, in whole pages; an edge matched in part is split."""
        node = self._root(key)
        found: list[PageArray] = []
        depth = 0
        while (child := self._child(node, tokens[depth:])) is not None:
            common = child.num_common_pages(tokens[depth:])
            if common < child.num_pages:
                child = self.split(child, common)
            child.last_used = step
            self._offer(child)
            found.append(child.pages)
            depth += common * self.page_size
            node = child
        return PrefixMatch(node, np.concatenate(found) if found else _NOTHING, depth)

    def peek(self, key: CacheKey, tokens: TokenArray) -> PageArray:
        """Return the pages that `match` would find, without any trace, not even in the order of eviction."""
        node, depth, found = self._root(key), 0, [_NOTHING]
        while (child := self._child(node, tokens[depth:])) is not None:
            common = child.num_common_pages(tokens[depth:])
            found.append(child.pages[:common])
            depth += common * self.page_size
            if common < child.num_pages:
                break
            node = child
        return np.concatenate(found)

    def has_page(self, node: RadixNode, tokens: TokenArray) -> bool:
        """Return True if the first page of `tokens` stands below `node`."""
        return self._child(node, tokens) is not None

    def extend(self, node: RadixNode, tokens: TokenArray, pages: PageArray) -> tuple[RadixNode, PageArray]:
        """Insert `pages` with their `tokens` below a locked node.

        |<- path to node ->|<- already there: duplicates ->|<- new: the tree takes these pages ->|

        Returns:
            The deepest node of the inserted path, for the caller to lock before anything else, and the given pages
            that the tree did not take because it already holds the same content. They stay the caller's: a request's
            page table is append-only.
        """
        start, depth = node, 0
        while (child := self._child(node, tokens[depth * self.page_size :])) is not None:
            common = child.num_common_pages(tokens[depth * self.page_size :])
            if common < child.num_pages:
                child = self.split(child, common)
            depth += common
            node = child
        duplicates, new = pages[:depth], pages[depth:]
        if len(new):
            new_tokens = tokens[depth * self.page_size :]
            if self.events is not None:
                parent_page = int(node.pages[-1]) if node.num_pages else None
                self.events.stored(_cache_key(node), parent_page, new_tokens, new)
            # A leaf that only the caller has locked grows in place: otherwise each decoded page would add a node.
            if node is start and node.parent is not None and node.is_leaf and node.locks == 1:
                node.append(new_tokens, new)
                self.num_pinned += len(new)
            else:
                node = self._add_child(node, new_tokens, new)
        return node, duplicates

    def replace(self, node: RadixNode, pages: PageArray) -> tuple[list[int], list[int]]:
        """Take `pages`, which hold the same content, for those of a node; some may already be its own.

        Returns:
            The replaced pages and those that replaced them, in order.
        """
        differs = node.pages != pages
        old, new = node.pages[differs].tolist(), pages[differs].tolist()
        node.pages[:] = pages
        if self.events is not None:
            self.events.replaced(old, new)
        return old, new

    def lock(self, node: RadixNode) -> None:
        """Pin the path from the root to `node`."""
        walk: RadixNode | None = node
        while walk is not None:
            if walk.locks == 0:
                self.num_evictable -= walk.num_pages
                self.num_pinned += walk.num_pages
            walk.locks += 1
            if walk.cache_key is not None:
                root = self._roots.setdefault(walk.cache_key, walk)
                assert root is walk, "locking a root that another one has replaced"
            walk = walk.parent

    def count_use(self, node: RadixNode) -> None:
        """Count a request that begins with the path from the root to a locked `node`."""
        walk: RadixNode | None = node
        while walk is not None:
            walk.num_uses += 1
            walk = walk.parent

    def unlock(self, node: RadixNode, step: int) -> None:
        """Undo one `lock` of the same path, which may have been split since; it counts as used in `step`."""
        walk: RadixNode | None = node
        while walk is not None:
            assert walk.locks > 0, "unlocking a path that is not locked"
            walk.locks -= 1
            walk.last_used = step
            if walk.locks == 0:
                self.num_pinned -= walk.num_pages
                self.num_evictable += walk.num_pages
                self._offer(walk)
            walk = walk.parent
        self._drop_empty_root(node)

    def num_unlocked_by(self, nodes: Iterable[RadixNode]) -> int:
        """Return how many pages on the paths to locked `nodes` would be evictable without one lock of each."""
        count, left = 0, dict[RadixNode, int]()
        for node in nodes:
            walk: RadixNode | None = node
            while walk is not None:
                left[walk] = left.get(walk, walk.locks) - 1
                count += walk.num_pages if not left[walk] else 0
                walk = walk.parent
        return count

    def evict(self, count: int) -> list[int]:
        """Give up `count` evictable pages of the leaves that come first; the caller has checked that they exist."""
        assert count <= self.num_evictable, f"evicting {count} of {self.num_evictable} pages"
        evicted: list[int] = []
        while len(evicted) < count:
            rank, _, node = heapq.heappop(self._queue)
            if not _is_current(node, rank):
                continue
            self._policy.evicting(node)
            taken = min(count - len(evicted), node.num_pages)
            evicted.extend(node.drop_tail(taken).tolist())
            self.num_evictable -= taken
            if node.num_pages:
                self._offer(node)
            else:
                self._remove(node)
        if self.events is not None:
            self.events.removed(evicted)
        return evicted

    def _root(self, key: CacheKey) -> RadixNode:
        """Return the root of a cache key. The first lock registers a new one, so that a mere look leaves no trace."""
        root = self._roots.get(key)
        if root is None:
            root = RadixNode(None, _NOTHING, _NOTHING, self.page_size, next(self._serials))
            root.cache_key = key
        return root

    def _child(self, node: RadixNode, tokens: TokenArray) -> RadixNode | None:
        if len(tokens) < self.page_size:
            return None
        return node.children.get(tokens[: self.page_size].tobytes())

    def split(self, node: RadixNode, count: int) -> RadixNode:
        """Put the first `count` pages of an edge into a new node above it; requests that hold `node` keep it."""
        parent = node.parent
        assert parent is not None, "a root has no edge to split"
        key = node.key
        upper = RadixNode(parent, *node.drop_head(count), self.page_size, next(self._serials))
        upper.locks = node.locks
        upper.last_used, upper.num_uses = node.last_used, node.num_uses
        upper.children[node.key] = node
        parent.children[key] = upper
        node.parent = upper
        self._num_nodes += 1
        return upper

    def _add_child(self, parent: RadixNode, tokens: TokenArray, pages: PageArray) -> RadixNode:
        node = RadixNode(parent, tokens, pages, self.page_size, next(self._serials))
        parent.children[node.key] = node
        self._num_nodes += 1
        self.num_evictable += len(pages)
        return node

    def _offer(self, node: RadixNode) -> None:
        """Queue an evictable leaf; amortized O(log nodes), with the stale entries that it clears away."""
        if not _is_evictable(node):
            return
        node.rank = self._policy.rank(node)
        heapq.heappush(self._queue, (node.rank, node.serial, node))
        if len(self._queue) > 2 * self._num_nodes:
            current = {serial: (rank, serial, node) for rank, serial, node in self._queue if _is_current(node, rank)}
            self._queue = list(current.values())
            heapq.heapify(self._queue)

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None, "a root is never evicted"
        del parent.children[node.key]
        node.parent = None
        self._num_nodes -= 1
        self._offer(parent)
        self._drop_empty_root(parent)

    def _drop_empty_root(self, node: RadixNode) -> None:
        """Forget a cache key without pages and users: salts are chosen by clients and must not pile up."""
        if node.cache_key is not None and not node.locks and not node.children:
            self._roots.pop(node.cache_key, None)

    def nodes(self, most: int | None = None) -> list[RadixNode]:
        """Return all nodes that hold pages, parents before children; if there are more than `most`, about as many."""
        found = list(self._roots.values())
        for node in found:
            if most is not None and len(found) > most:
                break
            found.extend(node.children.values())
        return [node for node in found if node.parent is not None]

    def check_invariants(self) -> None:
        """Raise AssertionError if counts, locks, keys or the eviction queue disagree with the tree."""
        nodes = self.nodes()
        assert len(nodes) == self._num_nodes, "node count is off"
        assert sum(n.num_pages for n in nodes if n.locks) == self.num_pinned, "pinned count is off"
        assert sum(n.num_pages for n in nodes if not n.locks) == self.num_evictable, "evictable count is off"
        offered = {id(node) for rank, _, node in self._queue if _is_current(node, rank)}
        for node in nodes:
            assert node.num_pages > 0, "an empty edge"
            assert node.parent is not None and node.parent.children[node.key] is node, "a child under a wrong key"
            assert node.parent.locks >= node.locks, "a locked node below an unlocked one"
            assert node.locks or not node.is_leaf or id(node) in offered, "an evictable leaf that is not queued"


class NullCache(RadixTree):
    """Keeps nothing (`--no-enable-prefix-caching`): every page stays its request's own."""

    keeps_pages = False

    def extend(self, node: RadixNode, tokens: TokenArray, pages: PageArray) -> tuple[RadixNode, PageArray]:
        """Refuse all pages as if they were duplicates."""
        return node, pages


def _cache_key(node: RadixNode) -> CacheKey:
    while node.parent is not None:
        node = node.parent
    assert node.cache_key is not None, "a path that does not end at a root"
    return node.cache_key


def _is_evictable(node: RadixNode) -> bool:
    return node.parent is not None and node.is_leaf and not node.locks


def _is_current(node: RadixNode, rank: Any) -> bool:
    """Return True if a queued entry still describes an evictable leaf."""
    return _is_evictable(node) and bool(node.rank == rank)
