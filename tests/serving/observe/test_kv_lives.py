"""vLLM's names for the lives of KV pages on /metrics."""

from __future__ import annotations

from types import SimpleNamespace

from tokenmill.core.engine_messages import EngineStats
from tokenmill.serving.observe.engine_metrics import engine_metrics
from tokenmill.startup.assembly.kv_metrics import PageLives

ZEROS = dict.fromkeys(
    (
        "step", "num_running", "num_waiting", "num_rows_used", "num_pages", "num_pages_pinned", "num_pages_evictable",
        "num_preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens",
    ),
    0,
)  # fmt: skip


def test_lives_have_vllms_names_and_engines_without_them_say_nothing() -> None:
    lives = PageLives(sample=1)
    lives.lifetime.add(3.0)
    stats = EngineStats(**ZEROS, **lives.counts())
    engine = SimpleNamespace(index=0, ready=None, stats=stats)
    samples = {one.name: one.value for family in engine_metrics([engine], "vllm") for one in family.samples}
    assert samples["vllm:kv_block_lifetime_seconds_sum"] == 3.0
    assert samples["vllm:kv_block_lifetime_seconds_count"] == 1
    assert {"vllm:kv_block_idle_before_evict_seconds_count", "vllm:kv_block_reuse_gap_seconds_count"} <= samples.keys()
    bare = SimpleNamespace(index=0, ready=None, stats=EngineStats(**ZEROS))
    assert not [family for family in engine_metrics([bare], "vllm") if "kv_block" in family.name]
