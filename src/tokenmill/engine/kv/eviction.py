"""Policies of eviction: which unused leaf of the prefix cache is given up first (`--eviction-policy`).

A leaf gives up its tail pages first, and its parent may follow when the leaf is gone. A policy of your own derives from
`EvictionPolicy`; like the scheduler's it must decide by steps and counts alone, never by a clock or a random number: a
schedule is recorded and replayed.
"""

from __future__ import annotations

from typing import Any

from tokenmill.engine.kv.radix_node import RadixNode

# Tokens of a context at which attention to it costs about as much as all else of a token does.
ATTENTION_EQUALS_REST = 8192


class EvictionPolicy:
    """Least recently used first, by step number; the default, and the base class of the others."""

    def rank(self, node: RadixNode) -> Any:
        """Return a sortable rank of a leaf without users: the lowest is given up first, equal ones by their age.

        Called when the leaf's last user leaves it, and when a waiting request finds it.
        """
        return node.last_used

    def evicting(self, node: RadixNode) -> None:
        """Take note of a leaf that gives up pages now."""


class LeastFrequentlyUsed(EvictionPolicy):
    """By the number of requests that began with it, then by time (SGLang's `lfu`)."""

    def rank(self, node: RadixNode) -> tuple[int, int]:
        """Return how many requests began with it, and the step that last used it."""
        return node.num_uses, node.last_used


class Segmented(EvictionPolicy):
    """All that no request has found before all that one has, each least recently used first (SGLang's `slru`).

    After segmented LRU (Karedla et al. 1994), without a bound on the second segment.
    """

    def rank(self, node: RadixNode) -> tuple[bool, int]:
        """Return whether a request began with it, and the step that last used it."""
        return node.num_uses > 0, node.last_used


class CostAware(EvictionPolicy):
    """By uses times the cost to compute a page again, over the rank of what was last given up.

    GreedyDual-Size-Frequency (Cherkasova 1998). All pages have as many bytes and tokens; those behind a long context
    cost more, for their tokens attend to it. Old fame fades: what is used later starts from a higher rank.
    """

    def __init__(self) -> None:
        self._level = 0.0

    def rank(self, node: RadixNode) -> tuple[float, int]:
        """Return its worth, and the step that last used it."""
        cost = 1 + sum(len(above.tokens) for above in node.path()) / ATTENTION_EQUALS_REST
        if node.ranked_at != node.last_used:
            node.ranked_at, node.level = node.last_used, self._level
        return node.level + (1 + node.num_uses) * cost, node.last_used

    def evicting(self, node: RadixNode) -> None:
        """Raise the level from which others start to the rank of this leaf."""
        self._level = max(self._level, self.rank(node)[0])


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": EvictionPolicy,
    "lfu": LeastFrequentlyUsed,
    "slru": Segmented,
    "cost": CostAware,
}
