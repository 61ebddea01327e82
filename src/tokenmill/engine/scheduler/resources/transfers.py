"""`Transfers`: the scheduler's interface for KV that comes from elsewhere or goes there.

A waiting request without pages is looked up once. When its turn comes, it loads what was found into pages of its own;
once these are loaded and verified, they become the prefix cache's, where the request finds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from tokenmill.core.request import Request
from tokenmill.core.transfers import KVQuery
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.resources.resource import Resource


class Transfers(Resource, ABC):
    """Orders loads and saves of KV. Decides by its arguments alone: the same calls give the same orders."""

    @property
    @abstractmethod
    def saving(self) -> Iterable[RadixNode]:
        """Deepest nodes of the paths locked for saves, each once per lock."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """True while an event is due for pages that a request may wait for."""

    @property
    @abstractmethod
    def has_orders(self) -> bool:
        """True if a plan must be made to carry orders, even one without requests."""

    @abstractmethod
    def look_up(self, requests: Iterable[Request]) -> list[KVQuery]:
        """Return queries for what other sources have of these requests, without those already known, each once."""

    @abstractmethod
    def fetch(self, request: Request, match: PrefixMatch, step: int, spare: int, num_free_rows: int) -> str:
        """Decide, when a waiting request without pages has its turn, whether more of it should be loaded first.

        Args:
            match: the request's prefix that the engine has.
            spare: pages that must stay available for others.

        Returns:
            "": it can be admitted. Else why it must wait; its status says whether it waits for an event.
        """

    @abstractmethod
    def drop_saves(self, step: int) -> None:
        """Drop the saves that no plan has ordered yet, and release their pages."""
