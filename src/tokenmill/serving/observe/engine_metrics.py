"""Turn the engines' latest `EngineStats` into Prometheus metrics at the moment of a scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from tokenmill.core.engine_messages import EngineStats
from tokenmill.core.histogram import Histogram
from tokenmill.serving.replicas.engine_handle import EngineHandle

_Family = GaugeMetricFamily | CounterMetricFamily
PAGE_LIVES = (
    ("lifetime", "Seconds from the storing of a KV page to its eviction, of a sample"),
    ("idle_before_evict", "Seconds from the last use of a KV page to its eviction, of a sample"),
    ("reuse_gap", "Seconds from one use of a KV page to the next, of a sample"),
)


def engine_metrics(engines: Iterable[EngineHandle], prefix: str) -> Iterator[Metric]:
    """Yield all metrics of the engines, with the label `engine`, without those not known yet."""
    info = InfoMetricFamily(f"{prefix}:cache_config", "Size of the KV cache", labels=["engine"])
    families: dict[str, _Family] = {}
    waiting = GaugeMetricFamily(
        f"{prefix}:num_requests_waiting_by_reason",
        "Waiting requests, by the resource they wait for",
        labels=["engine", "reason"],
    )
    accepted = CounterMetricFamily(
        f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that were accepted, by their position in the draft",
        labels=["engine", "position"],
    )
    tokens = HistogramMetricFamily(f"{prefix}:iteration_tokens_total", "Tokens of a step", labels=["engine"])
    seconds = HistogramMetricFamily(
        f"{prefix}:step_seconds", "Seconds of a step by part of the loop", labels=["engine", "part"]
    )
    loras = GaugeMetricFamily(
        f"{prefix}:lora_requests_info",
        "Adapters of running and of waiting requests; the value is the time",
        labels=["engine", "max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    engines = list(engines)
    for engine in engines:
        label, ready, stats = str(engine.index), engine.ready, engine.stats
        if ready is not None:
            # vLLM's names for the same two numbers stand beside ours, for its dashboards.
            own = {"page_size": str(ready.page_size), "num_pages": str(ready.num_pages)}
            info.add_metric([label], own | {"block_size": own["page_size"], "num_gpu_blocks": own["num_pages"]})
        if stats is None:
            continue
        for kind, numbers in ((GaugeMetricFamily, _gauges(stats)), (CounterMetricFamily, _counters(stats))):
            for name, help, value in numbers:
                family = families.setdefault(name, kind(f"{prefix}:{name}", help, labels=["engine"]))
                family.add_metric([label], value)
        if ready is not None and ready.max_loras:
            adapters = [",".join(stats.waiting_adapters), ",".join(stats.running_adapters)]
            loras.add_metric([label, str(ready.max_loras), *adapters], time.time())
        for reason, count in stats.waiting_by_reason.items():
            waiting.add_metric([label, reason], count)
        for position, count in enumerate(stats.num_accepted_per_position):
            accepted.add_metric([label, str(position)], count)
        _add(tokens, [label], stats.step_tokens)
        for part, values in stats.step_seconds.items():
            _add(seconds, [label, part], values)
    every = (info, *families.values(), waiting, accepted, loras, tokens, seconds, *_page_lives(engines, prefix))
    yield from (family for family in every if family.samples)


def _page_lives(engines: Iterable[EngineHandle], prefix: str) -> list[HistogramMetricFamily]:
    """Return what engines tell of the lives of cached pages."""
    families = [
        HistogramMetricFamily(f"{prefix}:kv_block_{name}_seconds", help, labels=["engine"]) for name, help in PAGE_LIVES
    ]
    for engine in engines:
        stats = engine.stats
        told = () if stats is None else (stats.kv_lifetime, stats.kv_idle, stats.kv_reuse_gap)
        for family, life in zip(families, told, strict=False):
            _add(family, [str(engine.index)], life)
    return families


def histogram(name: str, help: str, values: Histogram) -> Metric:
    """Return a histogram as Prometheus shows it."""
    family = HistogramMetricFamily(name, help)
    _add(family, [], values)
    return family


def _gauges(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    used = stats.num_pages_pinned / stats.num_pages if stats.num_pages else 0.0
    yield "num_requests_running", "Requests that run", stats.num_running
    yield "num_requests_waiting", "Requests that wait", stats.num_waiting
    yield "num_rows_used", "Rows of the page table in use", stats.num_rows_used
    yield "num_pages", "KV pages", stats.num_pages
    yield "num_pages_pinned", "KV pages that running requests use", stats.num_pages_pinned
    yield "num_pages_evictable", "KV pages that only the prefix cache keeps", stats.num_pages_evictable
    if stats.num_window_pages:
        pinned, evictable = stats.num_window_pages_pinned, stats.num_window_pages_evictable
        yield "num_window_pages", "KV pages of layers with a sliding window", stats.num_window_pages
        yield "num_window_pages_pinned", "Pages of these layers that running requests use", pinned
        yield "num_window_pages_evictable", "Pages of these layers that only the prefix cache keeps", evictable
    yield "kv_cache_usage_perc", "Share of KV pages in use by requests, 0 to 1", used


def _counters(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    yield "engine_steps", "Steps of the engine", stats.step
    yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries
    yield "prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits
    yield "prefix_cache_partial_hits", "Those of them in pages that end otherwise, copied", stats.prefix_partial_hits
    yield "num_preemptions", "Requests preempted", stats.num_preemptions
    yield "external_prefix_cache_hits", "Prompt tokens whose KV came from elsewhere", stats.num_loaded_tokens
    yield "kv_stored_tokens", "Tokens whose KV was stored elsewhere", stats.num_stored_tokens
    yield "corrupted_requests", "Requests ended by NaN or infinite logits", stats.num_corrupted
    yield "prompt_tokens", "Prompt tokens processed", stats.prompt_tokens
    yield "generation_tokens", "Tokens generated", stats.generation_tokens
    yield "mm_encoder_tokens", "Tokens of images and sound encoded", stats.encoder_tokens
    yield "mm_encoder_loaded_tokens", "Tokens of images and sound encoded elsewhere", stats.encoder_loaded_tokens
    yield "mm_encoder_failed_loads", "Encoder outputs expected from elsewhere and made here", stats.encoder_failed_loads
    yield "mm_cache_queries", "Images and clips of sound that steps needed", stats.encoder_queries
    yield "mm_cache_hits", "Images and clips whose encoder output was cached", stats.encoder_hits
    yield "state_saves", "Recurrent states kept for prefixes", stats.num_states_kept
    yield "state_hits", "Requests that began with a kept recurrent state", stats.num_state_hits
    yield "state_evictions", "Kept recurrent states that were evicted", stats.num_states_given_up
    yield "spec_decode_num_drafts", "Drafts that speculation made", stats.num_drafts
    yield "spec_decode_num_draft_tokens", "Draft tokens that speculation made", stats.num_draft_tokens
    yield "spec_decode_num_accepted_tokens", "Draft tokens that were accepted", stats.num_accepted_tokens


def _add(family: HistogramMetricFamily, labels: list[str], values: Histogram | None) -> None:
    if values is None:
        return
    bounds = [*map(str, values.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(values.counts), strict=True)), values.total)
