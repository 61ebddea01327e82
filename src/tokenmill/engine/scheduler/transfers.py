"""`Transfers`: the door for KV that comes from elsewhere or goes there.

A waiting request without pages is asked about once. What is found it loads when its turn comes, into pages of its own;
when they are there, and verified, they become the prefix cache's, where the request finds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tokenmill.core.request import Request
from tokenmill.core.transfers import KVNews, KVQuery, PlanTransfers
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.kv.radix_tree import PrefixMatch


class Transfers(Protocol):
    """Decides by what it is told here alone: the same calls give the same orders.

    Attributes:
        saving: the deepest nodes of the paths that are locked for saves, each as often as it is.
        num_loaded_tokens, num_stored_tokens: since the start; for metrics.
    """

    num_loaded_tokens: int
    num_stored_tokens: int

    @property
    def saving(self) -> Iterable[RadixNode]:
        """See the class."""

    @property
    def is_busy(self) -> bool:
        """True while news must come whose pages somebody may wait for."""

    @property
    def has_orders(self) -> bool:
        """True if a plan must be made to carry orders, even one without requests."""

    def ask(self, requests: Iterable[Request]) -> None:
        """Have it looked up what others have of these; those that are known already are left out."""

    def take_queries(self) -> list[KVQuery]:
        """What is to be looked up, each once."""

    def fetch(self, request: Request, match: PrefixMatch, step: int, spare: int, num_free_rows: int) -> str:
        """The turn of a waiting request without pages has come: see whether more of it should be loaded first.

        Args:
            match: what the engine has of it.
            spare: pages that must stay available for others.

        Returns:
            "": it can be admitted. Else why it must wait; its status says whether it does so for news.
        """

    def leaving(self, request: Request) -> None:
        """A request is about to lose what it holds, if it holds anything, or has ended."""

    def ended(self, request: Request) -> None:
        """A request has ended, and still holds its pages, if it has any. May be told twice."""

    def take_orders(self) -> PlanTransfers | None:
        """The orders for the next plan, each once."""

    def drop_saves(self, step: int) -> None:
        """Give up the saves that no plan has ordered yet, and let go of their pages."""

    def apply(self, news: KVNews, step: int) -> None:
        """Take in news. Those of what is over already are ignored."""

    def check_invariants(self) -> None:
        """Raise AssertionError where something is lost."""
