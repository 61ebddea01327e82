"""A node of the radix tree: one compressed edge of whole pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.request import CacheKey, TokenArray

PageArray = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """The edge from its parent to itself: page ids, the tokens whose KV they hold, and the children below.

    Attributes:
        children: first page of a child's tokens, as bytes -> child; keys compare by content, not by a hash alone.
        locks: requests whose locked path runs through this node; it cannot be evicted while there is one.
        last_used: number of the step that last matched or extended it.
        num_uses: requests that began with it.
        rank: its place in the order of eviction when it was last offered; level, ranked_at: see `CostAware`.
        serial: order of creation, breaks ties of ranks.
        cache_key: key of the tree whose root it is; None: not a root.
    """

    parent: RadixNode | None
    _tokens: TokenArray
    _pages: PageArray
    page_size: int
    serial: int
    num_pages: int = field(init=False)
    children: dict[bytes, RadixNode] = field(default_factory=dict, init=False)
    locks: int = field(default=0, init=False)
    last_used: int = field(default=0, init=False)
    num_uses: int = field(default=0, init=False)
    rank: Any = field(default=None, init=False)
    level: float = field(default=0.0, init=False)
    ranked_at: int = field(default=-1, init=False)
    cache_key: CacheKey | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_pages = len(self._pages)
        assert len(self._tokens) == self.num_pages * self.page_size, "an edge holds whole pages"
        self._tokens = np.array(self._tokens, dtype=np.int32)
        self._pages = np.array(self._pages, dtype=np.int32)

    @property
    def tokens(self) -> TokenArray:
        """Tokens of the edge, [num_pages * page_size] int32."""
        return self._tokens[: self.num_pages * self.page_size]

    @property
    def pages(self) -> PageArray:
        """Page ids of the edge, [num_pages] int32."""
        return self._pages[: self.num_pages]

    @property
    def key(self) -> bytes:
        """Key among its parent's children."""
        return self._tokens[: self.page_size].tobytes()

    @property
    def is_leaf(self) -> bool:
        """True if it has no children."""
        return not self.children

    def path(self) -> list[RadixNode]:
        """Return the nodes from the root to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def path_pages(self) -> PageArray:
        """Return the pages of all edges from the root to here, in order."""
        return np.concatenate([node.pages for node in self.path()])

    def append(self, tokens: TokenArray, pages: PageArray) -> None:
        """Lengthen the edge; amortized O(pages added), whatever its length."""
        total = self.num_pages + len(pages)
        if total > len(self._pages):
            capacity = max(2 * len(self._pages), total)
            self._tokens = _grown(self.tokens, capacity * self.page_size)
            self._pages = _grown(self.pages, capacity)
        self._tokens[self.num_pages * self.page_size : total * self.page_size] = tokens
        self._pages[self.num_pages : total] = pages
        self.num_pages = total

    def drop_tail(self, count: int) -> PageArray:
        """Shorten the edge by `count` pages and return them, the last one first."""
        assert 0 < count <= self.num_pages, "dropping more pages than the edge has"
        dropped = self.pages[self.num_pages - count :][::-1].copy()
        self.num_pages -= count
        return dropped

    def drop_head(self, count: int) -> tuple[TokenArray, PageArray]:
        """Cut the first `count` pages off and return their tokens and ids; the node keeps its identity and its tail."""
        assert 0 < count < self.num_pages, "a split leaves pages on both sides"
        head = self.tokens[: count * self.page_size].copy(), self.pages[:count].copy()
        self._tokens = self.tokens[count * self.page_size :].copy()
        self._pages = self.pages[count:].copy()
        self.num_pages -= count
        return head

    def num_common_pages(self, tokens: TokenArray) -> int:
        """Return the number of whole pages of the edge that `tokens` begins with."""
        length = min(len(tokens), self.num_pages * self.page_size)
        differs = np.flatnonzero(self._tokens[:length] != tokens[:length])
        return (int(differs[0]) if len(differs) else length) // self.page_size


def _grown(values: npt.NDArray[np.int32], capacity: int) -> npt.NDArray[np.int32]:
    grown = np.empty(capacity, dtype=np.int32)
    grown[: len(values)] = values
    return grown
