"""`--no-enable-prefix-caching`: the cache that never has anything, behind the same interface."""

from __future__ import annotations

import numpy as np

from tests.engine.scheduler.harness import Harness
from tokenmill.core.request import CacheKey
from tokenmill.engine.kv.radix_tree import NullCache


def test_nothing_is_found_and_every_page_stays_its_requests_own() -> None:
    cache = NullCache(page_size=2)
    tokens, pages = np.arange(4, dtype=np.int32), np.array([1, 2], dtype=np.int32)
    match = cache.match(CacheKey(), tokens, 1)
    assert (match.num_tokens, match.pages.tolist()) == (0, [])
    node, refused = cache.extend(match.node, tokens, pages)
    assert node is match.node
    assert refused.tolist() == [1, 2]
    assert cache.match(CacheKey(), tokens, 2).num_tokens == 0
    assert (cache.num_pinned, cache.num_evictable, cache.evict(0), cache.nodes()) == (0, 0, [], [])


def test_every_lock_is_undone() -> None:
    cache = NullCache(page_size=2)
    root = cache.match(CacheKey(), np.arange(2, dtype=np.int32), 1).node
    for users in (1, 2):
        cache.lock(root)
        assert root.locks == users
    for users in (1, 0):
        cache.unlock(root, 1)
        assert root.locks == users


def test_equal_prompts_share_nothing_and_nobody_waits_for_another() -> None:
    harness = Harness(num_pages=20, caching=False, budget=40)
    ids = [harness.add(list(range(12)), max_tokens=2) for _ in range(3)]
    harness.step()
    assert len(harness.scheduler.state.running) == 3
    assert harness.kv.num_pinned == 9
    harness.drain()
    assert [harness.records[i].num_cached_tokens for i in ids] == [0, 0, 0]
    assert harness.kv.num_hit_tokens == 0
    assert harness.engine.reset_prefix_cache()
