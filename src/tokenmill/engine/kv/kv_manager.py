"""`KVManager`: track which pages each request holds. Joins page pool and prefix cache; the only one that moves pages.

    |<------------ pages of a request, append-only while it holds them ------------>|
    |<- matched -->|<- handed to the tree, or duplicates of it ->|<- own: filling ->|
    |<------------ path locked in the tree ---------------------->|

A request that must run its whole prompt matches nothing. From the first page on that the tree already has, its pages
are private: it keeps its copies and locks none of the tree's, so it never pins its prompt twice.

A request with a recurrent state may begin before the end of its prefix in the tree, and makes copies of the rest. Where
no other request holds the tree's pages, the tree takes the copies in their place: no request pins a page twice for
itself alone, and what it computes behind its copies can be found.

Does not know why a request wants or loses pages; that is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import Request, TokenArray
from tokenmill.engine.kv.page_pool import RESERVED_PAGES, PagePool
from tokenmill.engine.kv.radix_node import PageArray, RadixNode
from tokenmill.engine.kv.radix_tree import NullCache, PrefixMatch, RadixTree

# A page that does not exist yet: the node that it will stand below, and its tokens.
PageKey = tuple[RadixNode, bytes]


@dataclass(slots=True)
class RequestPages:
    """Pages that one request holds.

    Attributes:
        pages: its page table, in order.
        num_tree_pages: leading pages that were matched, handed to the tree, or found to be duplicates.
        duplicates: its own pages among those: the tree holds the same content in other pages.
        node: deepest locked node; covers the first `num_tree_pages` pages by content.
        is_private: no further page of it is offered to the tree.
        next_page: the first page that it will offer, while all tokens of that page are known.
    """

    pages: list[int]
    num_tree_pages: int
    node: RadixNode
    duplicates: list[int] = field(default_factory=list)
    is_private: bool = False
    next_page: PageKey | None = None


class CachedPages(msgspec.Struct, frozen=True):
    """Pages of a request that the prefix cache has since the commit of a step.

    Attributes:
        first: number of the first page.
        pages: the pages of the cache.
        num_known: leading ones that it had already: the request keeps copies of its own.
    """

    request: Request
    first: int
    pages: PageArray
    num_known: int
    step: int


class KVManager:
    """Bookkeeping of all KV pages. Invariant: free + evictable + pinned == usable; a failed call changes nothing.

    Attributes:
        on_cached: called when the prefix cache has further pages of a request.
        on_matched: called when a request begins with a prefix that the cache had.
        on_evicted: called with pages that it has given up.
        on_replaced: called with pages given up for copies, and the copies, in order; empty: the cache keeps its own.
        keeps_kv: False: a request is whole in a step, and holds nothing between steps.
    """

    keeps_kv = True

    def __init__(self, pool: PagePool, cache: RadixTree, page_size: int) -> None:
        self.pool = pool
        self.cache = cache
        self.page_size = page_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.on_cached: list[Callable[[CachedPages], None]] = []
        self.on_matched: list[Callable[[PrefixMatch], None]] = []
        self.on_evicted: list[Callable[[list[int]], None]] = []
        self.on_replaced: list[Callable[[list[int], list[int]], None]] = []
        self._held: dict[str, RequestPages] = {}
        self._writers: dict[Hashable, Request] = {}

    @property
    def num_available(self) -> int:
        """Number of pages that an allocation could get now: free ones and those that the cache would give up."""
        return self.pool.num_free + self.cache.num_evictable

    @property
    def num_pinned(self) -> int:
        """Number of pages in use by requests, shared ones counted once."""
        return self.pool.num_usable - self.num_available

    def num_pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def check_size(self, num_tokens: int) -> None:
        """Raise InvalidRequest for a request that could never hold `num_tokens` tokens."""
        needed, usable = self.num_pages_for(num_tokens), self.pool.num_usable
        if needed > usable:
            raise InvalidRequest(f"{num_tokens} tokens need {needed} pages of the KV cache; it has {usable}")

    @property
    def shares_prefixes(self) -> bool:
        """True if equal prefixes can share pages at all."""
        return self.cache.keeps_pages

    def match(self, request: Request, step: int, most_tokens: int | None = None) -> PrefixMatch:
        """Find the cached prefix of a waiting request, without the last token, which is always run.

        Args:
            most_tokens: of the prefix, whole pages; None: as many as there are.
        """
        return self.cache.match(request.cache_key, self.matchable(request)[:most_tokens], step)

    def matchable(self, request: Request) -> TokenArray:
        """Return the tokens of a waiting request that need not be run: whole pages, without its last token."""
        usable = 0 if request.needs_whole_prompt else (request.num_tokens - 1) // self.page_size * self.page_size
        return request.token_ids[:usable]

    def missing_page(self, request: Request, match: PrefixMatch) -> PageKey | None:
        """Return the page that would lengthen a match; None if it could not be matched anyway."""
        match = match.longer or match
        start = len(match.pages) * self.page_size
        if request.needs_whole_prompt or not self.shares_prefixes or start + self.page_size >= request.num_tokens:
            return None
        return match.node, request.token_ids[start : start + self.page_size].tobytes()

    def num_common_tokens(self, request: Request, other: Request) -> int:
        """Return how many of a waiting request's matchable tokens another one begins with, in whole pages."""
        tokens = self.matchable(request)
        length = min(len(tokens), other.num_tokens)
        differs = np.flatnonzero(tokens[:length] != other.token_ids[:length])
        return (int(differs[0]) if len(differs) else length) // self.page_size * self.page_size

    def writer_of(self, page: Hashable, waiting: Request) -> Request | None:
        """Return the request to wait for, which is about to compute or load that page and to offer it to the cache.

        None if the class of `waiting` comes first: the writer would wait for as long as others of that class come. A
        load takes no turns.
        """
        writer = self._writers.get(page)
        if writer is None or writer.awaits_kv:
            return writer
        return writer if writer.is_running and not writer.is_behind(waiting) else None

    def announce(self, request: Request) -> None:
        """Note which page a request will offer to the cache next, so that others may wait for it."""
        held = self._held[request.id]
        self._withdraw(request, held)
        end = (held.num_tree_pages + 1) * self.page_size
        if self.shares_prefixes and not held.is_private and end <= request.num_tokens:
            held.next_page = held.node, request.token_ids[end - self.page_size : end].tobytes()
            other = self._writers.get(held.next_page)
            if other is None or other.is_behind(request):
                self._writers[held.next_page] = request

    def _withdraw(self, request: Request, held: RequestPages) -> None:
        if held.next_page is not None and self._writers.get(held.next_page) is request:
            del self._writers[held.next_page]
        held.next_page = None

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int, spare: int) -> bool:
        """Give a waiting request its matched pages and new ones, to hold `num_tokens` tokens in all.

        Args:
            spare: pages that must stay available for others.

        Returns:
            False if there are not enough pages; nothing has changed then.
        """
        assert request.id not in self._held, f"request {request.id} holds pages already"
        # Lock first: what was matched must not be evicted to make room for the rest.
        self.cache.lock(match.node)
        fresh = self._take(self.num_pages_for(num_tokens) - len(match.pages), spare)
        if fresh is None:
            self.cache.unlock(match.node, step)
            return False
        self.cache.count_use(match.node)
        matched = match.pages.tolist()
        self._held[request.id] = RequestPages(matched + fresh, len(matched), match.node)
        return True

    def count_match(self, request: Request, match: PrefixMatch) -> None:
        """Count the matched tokens of a request that begins."""
        if self.shares_prefixes and not request.needs_whole_prompt:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += match.num_tokens
            for listener in self.on_matched:
                listener(match)

    def allocate(self, request: Request, num_tokens: int, spare: int) -> list[int] | None:
        """Lengthen a request's pages to hold `num_tokens` tokens.

        Args:
            spare: pages that must stay available for others.

        Returns:
            The new pages (an empty list if none are needed), or None if there are not enough; nothing has changed then.
        """
        held = self._held[request.id]
        missing = self.num_pages_for(num_tokens) - len(held.pages)
        if missing <= 0:
            return []
        fresh = self._take(missing, spare)
        if fresh is not None:
            held.pages.extend(fresh)
        return fresh

    def trim(self, request: Request, num_tokens: int) -> int:
        """Take back the pages behind a request's first `num_tokens` tokens, and return their number."""
        held = self._held[request.id]
        spare = held.pages[max(self.num_pages_for(num_tokens), held.num_tree_pages) :]
        if spare:
            del held.pages[-len(spare) :]
            self.pool.free(spare[::-1])
        return len(spare)

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Return True if a request's pages hold `num_tokens` tokens."""
        return num_tokens <= len(self._held[request.id].pages) * self.page_size

    def num_missing_pages(self, request: Request, num_tokens: int) -> int:
        """Return the number of pages that a request lacks to hold `num_tokens` tokens."""
        return max(0, self.num_pages_for(num_tokens) - len(self._held[request.id].pages))

    def pages(self, request: Request) -> list[int]:
        """Return the page table of a request; the caller must not change it."""
        return self._held[request.id].pages

    def cached_page(self, request: Request, num_tokens: int) -> int | None:
        """Return the cached page that ends at a request's first `num_tokens` tokens, or None."""
        held, number = self._held[request.id], num_tokens // self.page_size
        if held.is_private or not self.shares_prefixes or not 0 < number <= held.num_tree_pages:
            return None
        return int(held.node.path_pages()[number - 1])

    def node(self, request: Request) -> RadixNode:
        """Return the deepest node of the tree that a request has locked."""
        return self._held[request.id].node

    def num_returned_by(self, requests: Iterable[Request], nodes: Iterable[RadixNode] = ()) -> int:
        """Return how many pages would be available if these requests released theirs and these nodes were unlocked."""
        all_held = [self._held[request.id] for request in requests]
        own = sum(len(held.pages) - held.num_tree_pages + len(held.duplicates) for held in all_held)
        return own + self.cache.num_unlocked_by([*(held.node for held in all_held), *nodes])

    def cache_full_pages(self, request: Request, num_tokens: int, step: int) -> None:
        """Make the full pages of the first `num_tokens` tokens matchable: the step that wrote them is committed."""
        held = self._held[request.id]
        first, num_full = held.num_tree_pages, num_tokens // self.page_size
        pages = np.array(held.pages[first:num_full], dtype=np.int32)
        tokens = request.token_ids[first * self.page_size : num_full * self.page_size]
        if request.needs_whole_prompt and self.cache.has_page(held.node, tokens):
            held.is_private = True
            self._withdraw(request, held)
        if held.is_private:
            return
        node, duplicates = self.cache.extend(held.node, tokens, pages)
        if node is not held.node:
            self.cache.lock(node)
            self.cache.unlock(held.node, step)
            held.node = node
        held.duplicates.extend(duplicates.tolist())
        held.num_tree_pages = num_full
        if len(duplicates):
            self._give_copies(held)
        self.announce(request)
        if self.on_cached and self.shares_prefixes:
            in_tree = held.node.path_pages()[first:num_full] if len(duplicates) else pages
            cached = CachedPages(request, first, in_tree, len(duplicates), step)
            for listener in self.on_cached:
                listener(cached)

    def give_copies(self, requests: Iterable[Request]) -> bool:
        """Let the tree take requests' copies for pages that no other request holds. Return False if there are none.

        Pages that were matched for a request without a lock may go. Page tables stay as they are.
        """
        return sum([self._give_copies(self._held[request.id]) for request in requests]) > 0

    def _give_copies(self, held: RequestPages) -> int:
        if not self.on_replaced:
            return 0
        before, node, end = len(held.duplicates), held.node, held.num_tree_pages
        while held.duplicates and node.locks == 1 and node.parent is not None:
            begin = end - node.num_pages
            old, new = self.cache.replace(node, np.array(held.pages[begin:end], dtype=np.int32))
            for listener in self.on_replaced:
                listener(old, new)
            self.pool.free(old[::-1])
            given = set(new)
            held.duplicates = [page for page in held.duplicates if page not in given]
            node, end = node.parent, begin
        return before - len(held.duplicates)

    def release(self, request: Request, step: int) -> None:
        """Take back all pages of a request. Cached pages stay matchable; its own go back tail first."""
        held = self._held.pop(request.id)
        self._withdraw(request, held)
        self.pool.free(held.pages[held.num_tree_pages :][::-1])
        self.pool.free(held.duplicates[::-1])
        self.cache.unlock(held.node, step)

    def clear_cache(self) -> bool:
        """Forget every cached prefix. Return False and change nothing while requests hold pages or saves read some."""
        if self._held or self.cache.num_pinned:
            return False
        self._evict(self.cache.num_evictable)
        if self.cache.events is not None:
            self.cache.events.cleared()
        return True

    def _take(self, count: int, spare: int) -> list[int] | None:
        if count + spare > self.num_available:
            return None
        self._evict(max(0, count - self.pool.num_free))
        return self.pool.allocate(count)

    def _evict(self, count: int) -> None:
        evicted = self.cache.evict(count)
        for listener in self.on_evicted:
            listener(evicted)
        self.pool.free(evicted)

    def cached_pages(self) -> list[int]:
        """Return all pages in the prefix cache."""
        return [page for node in self.cache.nodes() for page in node.pages.tolist()]

    def check_invariants(self) -> None:
        """Raise AssertionError if a page is lost or has two owners, or a locked path misses a request's tree pages."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        own = [p for h in self._held.values() for p in h.pages[h.num_tree_pages :] + h.duplicates]
        in_tree = self.cached_pages()
        assert len(set(own)) == len(own), "a page belongs to two requests"
        assert len(set(in_tree)) == len(in_tree), "a page is in the tree twice"
        assert not set(own) & set(in_tree), "a page belongs to a request and to the tree"
        assert len(own) + len(in_tree) + self.pool.num_free == self.pool.num_usable, "a page is lost"
        pinned = len(own) + self.cache.num_pinned
        assert self.pool.num_free + self.cache.num_evictable + pinned == self.pool.num_usable, "page counts are off"
        for held in self._held.values():
            shared = set(held.pages[: held.num_tree_pages]) - set(held.duplicates)
            assert shared <= set(held.node.path_pages().tolist()), "a request uses tree pages outside its locked path"
            assert held.node.locks > 0, "a request's path is not locked"
        for page, writer in self._writers.items():
            assert self._held[writer.id].next_page == page, "a page is announced by one who will not write it"


class NoKV(KVManager):
    """Bookkeeping for a model that keeps no KV: no request holds a page, and none finds anything computed before."""

    keeps_kv = False

    def __init__(self, page_size: int) -> None:
        super().__init__(PagePool(RESERVED_PAGES + 1), NullCache(page_size), page_size)

    def num_pages_for(self, num_tokens: int) -> int:
        """Return 0."""
        return 0

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Return True: nothing takes room."""
        return True

    def matchable(self, request: Request) -> TokenArray:
        """Return no tokens: all are run."""
        return request.token_ids[:0]

    def cache_full_pages(self, request: Request, num_tokens: int, step: int) -> None:
        """Do nothing: there are no pages."""
