"""Prometheus metrics of one server, in a registry of its own.

Two sources: `EngineStats`, whose numbers are passed on as they are when somebody scrapes, and what the API process
sees of each request. Labels come from closed sets, so no client can make them grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.messages import EngineReady, EngineStats
from tokenmill.request import FinishReason

PREFIX = "tokenmill:"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = tuple(float(2**i) for i in range(21))


class Metrics:
    """Records what clients experience and shows it together with the engine's own numbers."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._success = Counter(
            PREFIX + "request_success", "Finished requests", ["finished_reason"], registry=self._registry
        )
        self._finished = {reason: self._success.labels(reason.value) for reason in FinishReason}
        self._first_token = self._histogram("time_to_first_token_seconds", "From request to first token")
        self._between_tokens = self._histogram("inter_token_latency_seconds", "Between one token and the next")
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "From request to its end")
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generation = self._histogram("request_generation_tokens", "Output tokens of a request", _TOKENS)

    @property
    def stats(self) -> EngineStats | None:
        """The engine's latest numbers."""
        return self._engine.stats

    def engine_ready(self, ready: EngineReady) -> None:
        """Take in what the engine said of its cache; until it tells more, nothing has happened."""
        self._engine.ready = ready
        if self._engine.stats is None:
            counters: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0)
            self._engine.stats = EngineStats(**counters | {"num_pages": ready.num_pages})

    def engine_stats(self, stats: EngineStats) -> None:
        """Take in the engine's latest numbers."""
        self._engine.stats = stats

    def first_token(self, seconds: float) -> None:
        """See `RequestObserver`."""
        self._first_token.observe(seconds)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """See `RequestObserver`."""
        self._between_tokens.observe(seconds / num_tokens)

    def finished(self, reason: FinishReason, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """See `RequestObserver`."""
        self._finished[reason].inc()
        self._end_to_end.observe(seconds)
        self._prompt.observe(num_prompt_tokens)
        self._generation.observe(num_output_tokens)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(PREFIX + name, help, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """Shows the latest `EngineStats` at the moment of a scrape, so that a step costs nothing here."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self.ready: EngineReady | None = None

    def collect(self) -> Iterator[Metric]:
        if self.ready is not None:
            page_size, num_pages = str(self.ready.page_size), str(self.ready.num_pages)
            info = InfoMetricFamily(PREFIX + "cache_config", "Size of the KV cache")
            info.add_metric([], {"page_size": page_size, "num_pages": num_pages})
            yield info
        stats = self.stats
        if stats is None:
            return
        used = stats.num_pages_pinned / stats.num_pages if stats.num_pages else 0.0
        yield _gauge("num_requests_running", "Requests that run", stats.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait", stats.num_waiting)
        yield _gauge("num_rows_used", "Rows of the page table that are taken", stats.num_rows_used)
        yield _gauge("num_pages", "KV pages", stats.num_pages)
        yield _gauge("num_pages_pinned", "KV pages that running requests use", stats.num_pages_pinned)
        yield _gauge("num_pages_evictable", "KV pages that only the prefix cache keeps", stats.num_pages_evictable)
        yield _gauge("kv_cache_usage_perc", "Share of KV pages in use by requests, 0 to 1", used)
        yield _counter("engine_steps", "Steps of the engine", stats.step)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits)
        yield _counter("num_preemptions", "Requests preempted", stats.num_preemptions)
        yield _counter("prompt_tokens", "Prompt tokens processed", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated", stats.generation_tokens)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help, value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, help, value)
