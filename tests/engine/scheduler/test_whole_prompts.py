"""Requests that must run every token of their prompt, whatever the cache has: prompt_logprobs, mean pooling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.scheduler.harness import Harness

WISHES: list[dict[str, Any]] = [{"prompt_logprobs": 1}, {"pooling": "mean"}]


@pytest.mark.parametrize("wish", WISHES, ids=["prompt_logprobs", "mean"])
def test_a_prompt_that_fills_the_pool_and_is_cached_already_comes_to_its_end(wish: dict[str, Any]) -> None:
    harness = Harness(num_pages=4, page_size=4, max_num_seqs=1, budget=4, max_model_len=16)
    harness.add(list(range(12)), max_tokens=1)
    harness.drain()
    harness.add(list(range(12)), max_tokens=1 if "pooling" in wish else 4, **wish)
    harness.drain()
    assert harness.scheduler.state.num_preemptions == 0


def test_a_prompt_that_repeats_what_a_running_request_computes_comes_to_its_end() -> None:
    harness = Harness(
        num_pages=20, page_size=4, max_num_seqs=4, budget=16, max_model_len=80, batch_policy="prefill-first", depth=2
    )
    harness.add(list(range(24)), max_tokens=40)
    for _ in range(4):
        harness.step()
    harness.add([49] * 60, max_tokens=4, prompt_logprobs=1)
    harness.drain()


def test_it_pins_its_own_pages_and_none_of_those_that_hold_the_same_in_the_cache() -> None:
    harness = Harness(num_pages=12, page_size=4, budget=16)
    harness.add(list(range(12)), max_tokens=1)
    harness.drain()
    harness.add(list(range(12)), max_tokens=4, prompt_logprobs=1)
    harness.step()
    assert (harness.kv.num_pinned, harness.kv.cache.num_evictable) == (3, 3)
    harness.drain()


def test_its_pages_are_offered_to_others_where_the_cache_has_nothing_of_them() -> None:
    harness = Harness()
    harness.add(list(range(12)), max_tokens=1, prompt_logprobs=1)
    harness.drain()
    other = harness.add(list(range(12)), max_tokens=1)
    harness.drain()
    assert harness.records[other].num_cached_tokens == 8


@pytest.mark.parametrize("wish", WISHES, ids=["prompt_logprobs", "mean"])
def test_it_counts_neither_as_a_query_of_the_cache_nor_as_a_hit(wish: dict[str, Any]) -> None:
    harness = Harness()
    harness.add(list(range(12)), max_tokens=1, **wish)
    harness.drain()
    assert (harness.kv.num_queried_tokens, harness.kv.num_hit_tokens) == (0, 0)
    harness.add(list(range(12)), max_tokens=1)
    harness.drain()
    assert (harness.kv.num_queried_tokens, harness.kv.num_hit_tokens) == (12, 8)


def test_without_a_cache_nobody_counts_as_a_query() -> None:
    harness = Harness(caching=False)
    harness.add(list(range(12)), max_tokens=3)
    harness.drain()
    assert harness.kv.num_queried_tokens == 0
