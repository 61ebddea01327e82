"""`PageCopies`: let a request begin inside a page, behind what a cached page has in common with it.

    cached prefix       |<- page ->|<- page ->|<- equal ->|<- otherwise ->|
    request             |<- shared pages ---->|<- copied ->|<- computed ------ ...
                                              |<- its own page ->|

The page that follows its match is the request's own. Before its first step it becomes a copy of the cached page that
begins with most of the same tokens (as vLLM's copy-on-write of blocks), and the step begins where the two differ. The
rest of the copy is written before it is read, as in any page. A token's KV follows from the tokens up to it, so the
bits are those of a request that computed them.

A page that is read stays in the tree until the step is committed: a source of KV could fill it beside the steps. Where
the request's own pages were short of just that page, it is among them, and nobody else can have it. A page of the
window group may go at once: steps run in order, so a later one writes it after it was read; no load begins meanwhile.
Does not know the memory of pages: `CopiedPages` carries the copies out, in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.plan import StepPlan
from tokenmill.core.request import Request
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.resources.windows import Windows

# Newest pages below a match that are compared with a request's tokens.
MOST_COMPARED = 64


class PageCopy(msgspec.Struct, frozen=True):
    """A copy before a request's first step.

    Attributes:
        step: the step. num_tokens: tokens that the request need not run.
        source: the page that is read. window_source: the one beside it in the window group.
        number: of the page that becomes the copy, in the request's page table. target: that page.
        node: locked, its only page is the one read; None: that page is the request's own by now.
    """

    step: int
    source: int
    window_source: int
    number: int
    target: int
    num_tokens: int
    node: RadixNode | None


class PageCopies(Resource):
    """The copies that plans order, and the pages that launched steps read.

    Args:
        least_tokens: of a copy; fewer are computed.
        others: the resources of the scheduler before this one.

    Attributes:
        num_tokens: tokens that requests did not run since the start.
    """

    def __init__(self, kv: KVManager, least_tokens: int, others: Iterable[Resource] = ()) -> None:
        self.num_tokens = 0
        self._kv = kv
        self._least = least_tokens
        self._windows = next((one.pages for one in others if isinstance(one, Windows)), None)
        self._ordered: dict[str, PageCopy] = {}  # by request, for the next plan
        self._read: list[PageCopy] = []  # by steps in flight

    @property
    def reads_windows(self) -> bool:
        """True while steps read pages of the window group that may be another's by now."""
        return self._windows is not None and bool(self._ordered or self._read)

    def shorten(self, request: Request, match: PrefixMatch, step: int) -> PrefixMatch:
        """Return the match with as much of the next page as a cached page begins with."""
        size, children = self._kv.page_size, match.node.children
        start = len(match.pages) * size
        tokens = request.token_ids[start : min(start + size, request.num_tokens - 1)]
        if not children or len(tokens) < self._least or request.needs_whole_prompt:
            return match
        keys = list(islice(reversed(children), MOST_COMPARED))
        begins = np.frombuffer(b"".join(keys), dtype=np.int32).reshape(len(keys), size)[:, : len(tokens)]
        counts = np.logical_and.accumulate(begins == tokens, axis=1).sum(axis=1)
        pages = np.array([children[key].pages[0] for key in keys], dtype=np.int32)
        beside = pages if self._windows is None else self._windows.beside[pages]
        best = int(np.where(beside == 0, 0, counts).argmax())
        if counts[best] < self._least or not beside[best]:
            return match
        begins_as = children[keys[best]], int(pages[best]), int(beside[best])
        return msgspec.structs.replace(match, num_tokens=start + int(counts[best]), begins_as=begins_as)

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        """Order the copy for a request that has got its pages."""
        if match.begins_as is None:
            return ""
        (node, source, window_source), pages, cache = match.begins_as, self._kv.pages(request), self._kv.cache
        number, is_cached = len(match.pages), node.parent is not None
        if not is_cached and source not in pages:  # evicted by a try before this one, which then lacked something else
            return "the cached page that it begins as was evicted: it is looked for again"
        if is_cached:
            node = cache.split(node, 1) if node.num_pages > 1 else node
            cache.lock(node)
        count = match.num_tokens - number * self._kv.page_size
        read = node if is_cached else None
        self._ordered[request.id] = PageCopy(step, source, window_source, number, pages[number], count, read)
        return ""

    def release(self, request: Request, step: int) -> None:
        """Drop the copy of a request that does not begin after all."""
        copy = self._ordered.pop(request.id, None)
        if copy is not None:
            self._unlock(copy, step)

    def plan_fields(self) -> Mapping[str, Any]:
        """Return the copies."""
        if not self._ordered:
            return {}
        ordered, self._ordered = self._ordered, {}
        copies = [*ordered.values()]
        self.num_tokens += sum(copy.num_tokens for copy in copies)
        self._read += copies
        rows = [[copy.source for copy in copies], [copy.target for copy in copies]]
        if self._windows is not None:
            rows.append([copy.window_source for copy in copies])
            rows.append([self._windows.page_at(request_id, copy.number) for request_id, copy in ordered.items()])
        return {"page_copies": np.array(rows, dtype=np.int32)}

    def end_step(self, step: int) -> None:
        """Let go of the pages that the step has read."""
        if not self._read:
            return
        for copy in self._read:
            if copy.step <= step:
                self._unlock(copy, step)
        self._read = [copy for copy in self._read if copy.step > step]

    def _unlock(self, copy: PageCopy, step: int) -> None:
        if copy.node is not None:
            self._kv.cache.unlock(copy.node, step)

    def counts(self) -> Mapping[str, Any]:
        """Return how many tokens were copied."""
        return {"prefix_partial_hits": self.num_tokens}

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if a page that a launched step reads may go, or no launched step reads one."""
        assert not self._ordered, "a copy that no plan has ordered"
        ordered = [plan.page_copies[:2].T.tolist() for plan in plans if plan.page_copies is not None]
        read = [[copy.source, copy.target] for copy in self._read]
        assert read == [pair for pairs in ordered for pair in pairs], "copies of no launched step"
        for copy in self._read:
            if copy.node is not None:
                assert copy.node.locks and copy.node.pages.tolist() == [copy.source], "a page that is read may go"
