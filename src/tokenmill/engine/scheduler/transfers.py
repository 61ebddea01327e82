"""`Transfers`: the scheduler's interface for KV that comes from elsewhere or goes there.

A waiting request without pages is looked up once. When its turn comes, it loads what was found into pages of its own;
once these are loaded and verified, they become the prefix cache's, where the request finds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tokenmill.core.request import Request
from tokenmill.core.transfers import KVNews, KVQuery, PlanTransfers
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.kv.radix_tree import PrefixMatch


class Transfers(Protocol):
    """Orders loads and saves of KV. Decides by its arguments alone: the same calls give the same orders.

    Attributes:
        saving: the deepest nodes of the paths that are locked for saves, each as often as it is.
        num_loaded_tokens, num_stored_tokens: since the start; for metrics.
    """

    num_loaded_tokens: int
    num_stored_tokens: int

    @property
    def saving(self) -> Iterable[RadixNode]:
        """Deepest nodes of the paths locked for saves, each once per lock."""

    @property
    def is_busy(self) -> bool:
        """True while news is due about pages that a request may wait for."""

    @property
    def has_orders(self) -> bool:
        """True if a plan must be made to carry orders, even one without requests."""

    def ask(self, requests: Iterable[Request]) -> None:
        """Queue queries for what other sources have of these requests, without those already known."""

    def take_queries(self) -> list[KVQuery]:
        """Return the queued queries, each once."""

    def fetch(self, request: Request, match: PrefixMatch, step: int, spare: int, num_free_rows: int) -> str:
        """Decide, when a waiting request without pages has its turn, whether more of it should be loaded first.

        Args:
            match: the request's prefix that the engine has.
            spare: pages that must stay available for others.

        Returns:
            "": it can be admitted. Else why it must wait; its status says whether it does so for news.
        """

    def leaving(self, request: Request) -> None:
        """Take in that a request is about to lose what it holds, if anything, or has ended."""

    def ended(self, request: Request) -> None:
        """Take in that a request has ended; it still holds its pages, if it has any. May be called twice."""

    def take_orders(self) -> PlanTransfers | None:
        """Return the orders for the next plan, each once."""

    def drop_saves(self, step: int) -> None:
        """Drop the saves that no plan has ordered yet, and release their pages."""

    def apply(self, news: KVNews, step: int) -> None:
        """Take in news; ignore news of transfers that are already over."""

    def check_invariants(self) -> None:
        """Raise AssertionError if something is lost."""
