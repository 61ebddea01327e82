"""The engine's own numbers as Prometheus metrics, made from its latest `EngineStats` when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from tokenmill.messages import EngineReady, EngineStats
from tokenmill.tally import Tally


def engine_metrics(stats: EngineStats | None, ready: EngineReady | None, prefix: str) -> Iterator[Metric]:
    """All of them; none that is not known yet."""
    if ready is not None:
        info = InfoMetricFamily(f"{prefix}:cache_config", "Size of the KV cache")
        # vLLM's names for the same two numbers stand beside ours, for its dashboards.
        own = {"page_size": str(ready.page_size), "num_pages": str(ready.num_pages)}
        info.add_metric([], own | {"block_size": own["page_size"], "num_gpu_blocks": own["num_pages"]})
        yield info
    if stats is None:
        return
    for name, help, value in _gauges(stats):
        yield GaugeMetricFamily(f"{prefix}:{name}", help, value)
    for name, help, value in _counters(stats):
        yield CounterMetricFamily(f"{prefix}:{name}", help, value)
    waiting = GaugeMetricFamily(
        f"{prefix}:num_requests_waiting_by_reason", "Requests that wait, by what for", labels=["reason"]
    )
    for reason, count in stats.waiting_by_reason.items():
        waiting.add_metric([reason], count)
    yield waiting
    if stats.step_tokens is not None:
        yield histogram(f"{prefix}:iteration_tokens_total", "Tokens of a step", stats.step_tokens)
    seconds = HistogramMetricFamily(f"{prefix}:step_seconds", "Seconds of a step by part of the loop", labels=["part"])
    for part, tally in stats.step_seconds.items():
        _add(seconds, [part], tally)
    yield seconds


def histogram(name: str, help: str, tally: Tally) -> Metric:
    """A tally as Prometheus shows it."""
    family = HistogramMetricFamily(name, help)
    _add(family, [], tally)
    return family


def _gauges(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    used = stats.num_pages_pinned / stats.num_pages if stats.num_pages else 0.0
    yield "num_requests_running", "Requests that run", stats.num_running
    yield "num_requests_waiting", "Requests that wait", stats.num_waiting
    yield "num_rows_used", "Rows of the page table that are taken", stats.num_rows_used
    yield "num_pages", "KV pages", stats.num_pages
    yield "num_pages_pinned", "KV pages that running requests use", stats.num_pages_pinned
    yield "num_pages_evictable", "KV pages that only the prefix cache keeps", stats.num_pages_evictable
    yield "kv_cache_usage_perc", "Share of KV pages in use by requests, 0 to 1", used


def _counters(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    yield "engine_steps", "Steps of the engine", stats.step
    yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries
    yield "prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits
    yield "num_preemptions", "Requests preempted", stats.num_preemptions
    yield "prompt_tokens", "Prompt tokens processed", stats.prompt_tokens
    yield "generation_tokens", "Tokens generated", stats.generation_tokens
    yield "spec_decode_num_drafts", "Drafts that speculation made", stats.num_drafts
    yield "spec_decode_num_draft_tokens", "Tokens of these drafts", stats.num_draft_tokens
    yield "spec_decode_num_accepted_tokens", "Those of them that were kept", stats.num_accepted_tokens


def _add(family: HistogramMetricFamily, labels: list[str], tally: Tally) -> None:
    bounds = [*map(str, tally.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(tally.counts), strict=True)), tally.total)
