"""Keep the Prometheus metrics of one server in a registry of its own.

Two sources: each engine's `EngineStats`, whose numbers are passed on as they are at a scrape, and what the
API process sees of each request. Labels come from closed sets, so no client can make them grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.core.api_messages import FinishedRequest
from tokenmill.core.histogram import Histogram
from tokenmill.core.request import FinishReason
from tokenmill.serving.observe.engine_metrics import engine_metrics, histogram
from tokenmill.serving.observe.traces import TraceExporter
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.replicas.restarts import PartCounts

PREFIX = "tokenmill"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = tuple(float(2**i) for i in range(21))


class Metrics:
    """Records what clients experience and shows it together with the engines' own numbers.

    Args:
        engines: the engines whose numbers are shown.
        parts: counts of dropped messages, restarts and lost lines; read at the moment of a scrape.
        prefix: the names are shown with this prefix too, and there with the labels that vLLM's dashboards select by.
        model_name: the label `model_name` of the metrics with that prefix.
        traces: gets each finished request.
    """

    def __init__(
        self,
        engines: Iterable[EngineHandle],
        parts: PartCounts,
        prefix: str = PREFIX,
        model_name: str = "",
        traces: TraceExporter | None = None,
    ) -> None:
        self._traces = traces
        self._registry = CollectorRegistry()
        # Once for every delta of every stream: Prometheus' own histogram costs twenty times as much.
        self._between_tokens = Histogram.with_bounds(SECONDS)
        self._registry.register(_Collector(engines, parts, self._between_tokens))
        self._alias = _Alias(self._registry, prefix, model_name) if prefix != PREFIX else None
        self._success = Counter(
            f"{PREFIX}:request_success", "Finished requests", ["finished_reason"], registry=self._registry
        )
        self._finished = {reason: self._success.labels(reason.value) for reason in FinishReason}
        self._volatile = self._counter("volatile_blocks", "Blocks of prompts that a rule dropped or moved", "rule")
        self._changes = self._counter(
            "prefix_changes", "Prompts whose cached prefix ended at a short change from the last one", "cause"
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "From request to first token")
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens"
        )
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "From request to its end")
        self._queue = self._histogram("request_queue_time_seconds", "From request to its first step")
        self._prefill = self._histogram("request_prefill_time_seconds", "From its first step to its first token")
        self._decode = self._histogram("request_decode_time_seconds", "From first to last token")
        self._inference = self._histogram("request_inference_time_seconds", "From its first step to its last token")
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generation = self._histogram("request_generation_tokens", "Output tokens of a request", _TOKENS)
        self._pooled = self._counter(
            "pooling_requests", "Finished requests for vectors and scores, a text each", "finished_reason"
        )
        self._pooled_tokens = Counter(
            f"{PREFIX}:pooling_prompt_tokens", "Tokens of texts that became vectors or scores", registry=self._registry
        )
        self._pooled_seconds = self._histogram("pooling_latency_seconds", "From a text to its vector or scores")

    def first_token(self, seconds: float) -> None:
        """Observe the time from a request to its first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Observe the time per token of further tokens."""
        self._between_tokens.add(seconds / num_tokens)

    def between_tokens(self, seconds: Histogram) -> None:
        """Merge a histogram of the times between tokens."""
        self._between_tokens.merge(seconds)

    def finished(self, request: FinishedRequest) -> None:
        """Count a finished request, and observe its phases and its tokens."""
        if self._traces is not None:
            self._traces.add(request)
        self._finished[request.reason].inc()
        for rule in request.volatile:
            self._volatile.labels(rule).inc()
        if request.prefix_change:
            self._changes.labels(request.prefix_change).inc()
        self._end_to_end.observe(request.ended - request.arrived)
        self._prompt.observe(request.num_prompt_tokens)
        if request.is_pooled:
            self._observe_pooled(request)
        else:
            self._generation.observe(request.num_output_tokens)
        if request.scheduled:
            self._queue.observe(max(0.0, request.scheduled - request.arrived))
        if not request.first_output:
            return
        decode = request.last_output - request.first_output
        if request.num_output_tokens > 1:
            self._per_token.observe(decode / (request.num_output_tokens - 1))
        # The engine tells when a request was scheduled at its end: of one that its client left no part is counted, so
        # that the parts add up.
        if request.scheduled:
            self._decode.observe(decode)
            self._prefill.observe(max(0.0, request.first_output - request.scheduled))
            self._inference.observe(max(0.0, request.last_output - request.scheduled))

    def _observe_pooled(self, request: FinishedRequest) -> None:
        """Count a text; its tokens and its time are those of its vector, if it got one."""
        self._pooled.labels(request.reason.value).inc()
        if request.reason not in (FinishReason.ABORT, FinishReason.ERROR):
            self._pooled_tokens.inc(request.num_prompt_tokens)
            self._pooled_seconds.observe(request.ended - request.arrived)

    def show(self, collector: Collector) -> None:
        """Show the numbers of another collector, too."""
        self._registry.register(collector)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        own = generate_latest(self._registry)
        return own if self._alias is None else own + generate_latest(self._alias)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(f"{PREFIX}:{name}", help, [label], registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = SECONDS) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(f"{PREFIX}:{name}", help, buckets=buckets, registry=self._registry)


class _Collector(Collector):
    """Reads the latest `EngineStats` and a histogram at the moment of a scrape, so that a step costs nothing here."""

    def __init__(self, engines: Iterable[EngineHandle], parts: PartCounts, between_tokens: Histogram) -> None:
        self._engines = engines
        self._parts = parts
        self._between_tokens = between_tokens

    def collect(self) -> Iterator[Metric]:
        for name, label, counts, help in (
            ("messages_dropped", "inbox", self._parts.dropped, "Messages between processes that could not be read"),
            ("restarts", "part", self._parts.restarts, "How often an engine or a text worker was started again"),
            ("log_lines_lost", "part", self._parts.lost_lines, "Lines of the log that could not be written"),
        ):
            family = CounterMetricFamily(f"{PREFIX}:{name}", help, labels=[label])
            for part, count in counts.items():
                family.add_metric([part], count)
            yield family
        yield from engine_metrics(self._engines, PREFIX)
        help = "Between one token and the next"
        yield histogram(f"{PREFIX}:inter_token_latency_seconds", help, self._between_tokens)


class _Alias(CollectorRegistry):
    """The same metrics under another prefix."""

    def __init__(self, registry: CollectorRegistry, prefix: str, model_name: str) -> None:
        super().__init__()
        self._source = registry
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            renamed = Metric(self._rename(metric.name), metric.documentation, metric.type)
            for sample in metric.samples:
                labels = self._labels | sample.labels
                renamed.samples.append(sample._replace(name=self._rename(sample.name), labels=labels))
            yield renamed

    def _rename(self, name: str) -> str:
        return self._prefix + name.removeprefix(PREFIX)
