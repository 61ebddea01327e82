"""Policies of eviction against a slow model: all leaves ranked anew for each page that is given up."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.errors import InvalidConfig
from tokenmill.core.request import CacheKey
from tokenmill.engine.kv.eviction import EVICTION_POLICIES, CostAware, EvictionPolicy
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.kv.radix_tree import RadixTree
from tokenmill.engine.scheduler.config import find_policies

KEY = CacheKey("model", "", "")
NAMES = sorted(EVICTION_POLICIES)


class Uses:
    """Requests one after the other over a tree of pages of one token."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.tree = RadixTree(1, policy=policy)
        self.step = 0
        self._page = iter(range(1, 1 << 20))

    def run(self, tokens: list[int]) -> int:
        """Find a prompt's prefix, store the rest of it, and return how many tokens were found."""
        self.step += 1
        ids = np.array(tokens, dtype=np.int32)
        match = self.tree.match(KEY, ids, self.step)
        self.tree.lock(match.node)
        self.tree.count_use(match.node)
        rest = ids[match.num_tokens :]
        pages = np.array([next(self._page) for _ in rest], dtype=np.int32)
        node, _ = self.tree.extend(match.node, rest, pages)
        if node is not match.node:
            self.tree.lock(node)
            self.tree.unlock(match.node, self.step)
        self.tree.unlock(node, self.step)
        self.tree.check_invariants()
        return match.num_tokens

    def leaves(self) -> list[RadixNode]:
        return [node for node in self.tree.nodes() if node.is_leaf]


@pytest.mark.parametrize("name", NAMES)
def test_the_queue_gives_what_ranking_all_leaves_anew_gives(name: str, rng: np.random.Generator) -> None:
    policy = EVICTION_POLICIES[name]()
    uses = Uses(policy)
    for _ in range(300):
        if rng.random() < 0.7 or uses.tree.num_evictable < 3:
            uses.run(rng.integers(0, 3, int(rng.integers(1, 9))).tolist())
            continue
        for _ in range(int(rng.integers(1, 4))):
            page = int(min(uses.leaves(), key=lambda node: (policy.rank(node), node.serial)).pages[-1])
            assert uses.tree.evict(1) == [page]
        uses.tree.check_invariants()


@pytest.mark.parametrize(("name", "is_kept"), [("lru", False), ("lfu", True), ("slru", True), ("cost", True)])
def test_a_prefix_that_many_begin_with_outlives_a_scan_of_new_ones(name: str, is_kept: bool) -> None:
    """Forty pages: a prompt of ten that is found five times, then new prompts of ten, one after the other."""
    uses = Uses(EVICTION_POLICIES[name]())
    popular = list(range(10))
    for _ in range(6):
        uses.run(popular)
    for number in range(1, 6):
        uses.run(list(range(100 * number, 100 * number + 10)))
        uses.tree.evict(max(0, uses.tree.num_evictable - 40))
    assert (uses.run(popular) == 10) is is_kept


def test_old_fame_fades_where_cost_decides() -> None:
    """LFU would keep what was once found ten times for ever; GreedyDual forgets it while other things are used."""
    uses = Uses(CostAware())
    for _ in range(11):
        uses.run([1, 2, 3])
    for number in range(400):
        uses.run([10 + number % 7, 20 + number % 7])
        uses.tree.evict(max(0, uses.tree.num_evictable - 6))
    assert uses.run([1, 2, 3]) == 0


def test_of_two_prefixes_that_are_used_alike_the_longer_one_costs_more() -> None:
    uses = Uses(CostAware())
    long, short = list(range(1000, 3000)), list(range(10))
    uses.run(long)
    uses.run(short)
    assert uses.tree.evict(1) != [2000], "a page behind 2,000 tokens costs more than one behind ten"


def test_a_split_hands_its_uses_down() -> None:
    uses = Uses(EvictionPolicy())
    for _ in range(3):
        uses.run([1, 2, 3, 4])
    uses.run([1, 2, 9])
    counts = {tuple(node.tokens.tolist()): node.num_uses for node in uses.tree.nodes()}
    assert counts == {(1, 2): 3, (3, 4): 2, (9,): 0}


def test_a_name_without_a_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidConfig, match="--eviction-policy must be one of lru, lfu, slru, cost, an entry point"):
        find_policies("fair", "mixed", "whole-prompt", "mru")
