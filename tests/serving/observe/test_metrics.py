import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.eventually import eventually_async
from tests.serving.frontend.test_text_processor import ready
from tokenmill.core.api_messages import FinishedRequest
from tokenmill.core.engine_messages import EngineStats
from tokenmill.core.histogram import SECONDS, Histogram
from tokenmill.core.request import FinishReason
from tokenmill.serving.observe.event_log import EventLog
from tokenmill.serving.observe.metrics import Metrics
from tokenmill.serving.observe.traces import TraceExporter
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.replicas.engines import Engines
from tokenmill.serving.replicas.health import PartHealth
from tokenmill.serving.replicas.restarts import PartCounts
from tokenmill.serving.server.process.first_process import ThroughputLog

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"

# The list of the surface that users know: what existing dashboards and alerts ask for.
NAMES = [
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "corrupted_requests_total",
    "external_prefix_cache_hits_total", "kv_stored_tokens_total", "prompt_tokens_total", "generation_tokens_total",
    "iteration_tokens_total_bucket", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "cache_config_info", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total", "step_seconds_bucket",
    "pooling_requests_total", "pooling_prompt_tokens_total", "pooling_latency_seconds_bucket",
]  # fmt: skip


def stats(**changes) -> EngineStats:
    required = [field.name for field in msgspec.structs.fields(EngineStats) if field.required]
    return EngineStats(**(dict.fromkeys(required, 0) | {"num_pages": 100} | changes))


def finished(reason=FinishReason.STOP, **changes) -> FinishedRequest:
    """Arrived at 10, first run at 12, first token at 15, last at 24, gone at 25."""
    fields = {
        "label": "cmpl-1", "trace": "", "arrived": 10.0, "scheduled": 12.0, "first_output": 15.0, "last_output": 24.0,
        "ended": 25.0, "num_prompt_tokens": 10, "num_cached_tokens": 4, "num_output_tokens": 19,
    }  # fmt: skip
    return FinishedRequest(reason=reason, **(fields | changes))


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        sample.name.removeprefix("tokenmill:") + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def engine(*told: EngineStats, index: int = 0) -> EngineHandle:
    """An engine that is ready and has told these numbers."""
    handle = EngineHandle(index, lambda message: None, [PartHealth("the engine", 30)])
    handle.handle_message(ready(num_pages=64, engine=index))
    for numbers in told:
        handle.handle_message(numbers)
    return handle


def metrics_of(*told: EngineStats, **how) -> Metrics:
    """Of a server whose engine has told these numbers."""
    return Metrics([engine(*told)], PartCounts(), **how)


def busy_metrics(**how) -> Metrics:
    """Of a server that has done a little of everything."""
    metrics = metrics_of(busy_stats(), **how)
    metrics.first_token(0.1)
    metrics.next_tokens(1, 0.1)
    metrics.finished(finished())
    metrics.finished(finished(num_output_tokens=0, first_output=0.0, is_pooled=True))
    return metrics


def busy_stats(**changes) -> EngineStats:
    histogram = Histogram.with_bounds(SECONDS)
    histogram.add(0.002)
    return stats(
        waiting_by_reason={"capacity": 1},
        step_tokens=histogram,
        step_seconds={"schedule": histogram, "run": histogram},
        num_accepted_per_position=[4, 2],
        **changes,
    )


def exposed(metrics: Metrics) -> set[str]:
    text = metrics.exposition().decode()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def test_the_engines_latest_numbers_are_shown():
    latest = stats(num_running=3, num_waiting=2, num_pages_pinned=25, prompt_tokens=7, prefix_hits=4)
    shown = samples(metrics_of(stats(num_running=1), latest))
    assert shown["num_requests_running[0]"] == 3
    assert shown["num_requests_waiting[0]"] == 2
    assert shown["kv_cache_usage_perc[0]"] == 0.25
    assert shown["prompt_tokens_total[0]"] == 7
    assert shown["prefix_cache_hits_total[0]"] == 4
    assert not any("window" in name for name in shown)
    shown = samples(metrics_of(stats(num_window_pages=9, num_window_pages_pinned=4, num_window_pages_evictable=3)))
    assert [shown[f"num_window_pages{what}[0]"] for what in ("", "_pinned", "_evictable")] == [9, 4, 3]


def test_each_engine_has_its_own_numbers():
    engines = [engine(busy_stats(num_running=3)), engine(busy_stats(num_running=5), index=1)]
    busy = Metrics(engines, PartCounts(), prefix="vllm")
    families = list(text_string_to_metric_families(busy.exposition().decode()))
    for prefix in ("tokenmill", "vllm"):
        of_engines: dict[str, list[str]] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith(f"{prefix}:") and not sample.labels.keys() & {"le", "part"}:
                of_engines.setdefault(sample.name, []).append(sample.labels.get("engine"))
        for name in (
            "num_requests_running",
            "num_requests_waiting_by_reason",
            "cache_config_info",
            "engine_steps_total",
        ):
            assert of_engines[f"{prefix}:{name}"] == ["0", "1"]
    shown = samples(busy)
    assert (shown["num_requests_running[0]"], shown["num_requests_running[1]"]) == (3, 5)
    assert shown["step_seconds_count[1][run]"] == shown["iteration_tokens_total_count[1]"] == 1


def test_the_numbers_of_several_engines_add_up():
    both = Engines([engine(stats(num_running=1, num_queued=2)), engine(stats(num_running=4, num_queued=3), index=1)])
    assert both.stats == stats(num_running=5, num_queued=5, num_pages=200)


def test_before_the_first_step_all_is_zero():
    shown = samples(metrics_of())
    assert (shown["num_requests_running[0]"], shown["num_pages[0]"]) == (0, 64)


def test_an_engine_that_has_told_nothing_is_not_shown():
    silent = EngineHandle(0, lambda message: None, [PartHealth("the engine", 30)])
    assert not any("[0]" in name for name in samples(Metrics([silent], PartCounts())))


def test_every_name_of_the_surface_is_there():
    assert {f"tokenmill:{name}" for name in NAMES} <= exposed(busy_metrics())


def test_under_vllms_prefix_they_have_its_labels():
    metrics = busy_metrics(prefix="vllm", model_name="mill")
    assert {f"{prefix}:{name}" for name in NAMES for prefix in ("vllm", "tokenmill")} <= exposed(metrics)
    families = list(text_string_to_metric_families(metrics.exposition().decode()))
    theirs = [s for family in families for s in family.samples if s.name.startswith("vllm:")]
    assert theirs
    assert {(s.labels["model_name"], s.labels["engine"]) for s in theirs} == {("mill", "0")}
    own = {s.name: s.value for family in families for s in family.samples if s.name.startswith("tokenmill:")}
    assert {s.name.replace("vllm:", "tokenmill:"): s.value for s in theirs} == own


def test_requests_are_counted_by_how_they_ended():
    metrics = metrics_of()
    for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.ABORT):
        metrics.finished(finished(reason))
    shown = samples(metrics)
    assert {reason: shown[f"request_success_total[{reason}]"] for reason in FinishReason} == {
        "stop": 2, "length": 0, "abort": 1, "error": 0,
    }  # fmt: skip
    assert shown["e2e_request_latency_seconds_count"] == 3


def test_texts_that_become_vectors_are_counted_by_themselves():
    metrics = metrics_of(stats())
    pooled = {"num_output_tokens": 0, "first_output": 0.0, "is_pooled": True}
    for reason in (FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ABORT):
        metrics.finished(finished(reason, **pooled))
    metrics.finished(finished())
    shown = samples(metrics)
    assert shown["pooling_requests_total[length]"] == 2
    assert shown["pooling_requests_total[abort]"] == 1
    assert shown["pooling_prompt_tokens_total"] == 20, "of those that got a vector"
    assert shown["pooling_latency_seconds_sum"] == 30
    assert shown["request_generation_tokens_count"] == 1, "they generate nothing, which is not zero tokens"
    assert shown["request_prompt_tokens_count"] == 4


def test_the_parts_of_requests_add_up_whoever_left_in_between():
    metrics = metrics_of()
    metrics.finished(finished())
    metrics.finished(finished(FinishReason.ABORT, scheduled=0.0))
    metrics.finished(finished(FinishReason.ABORT, scheduled=0.0, first_output=0.0, last_output=10.0))
    shown = samples(metrics)
    parts = [shown[f"request_{part}_time_seconds_sum"] for part in ("prefill", "decode", "inference")]
    assert parts == [3.0, 9.0, 12.0]
    assert shown["request_generation_tokens_sum"] == 57


def test_a_request_is_cut_into_its_phases():
    metrics = metrics_of()
    metrics.finished(finished())
    shown = samples(metrics)
    sums = {name: shown[f"request_{name}_seconds_sum"] for name in
            ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token")}  # fmt: skip
    assert sums == {
        "queue_time": 2,
        "prefill_time": 3,
        "decode_time": 9,
        "inference_time": 12,
        "time_per_output_token": 0.5,
    }


def test_a_request_that_never_ran_has_no_phases():
    metrics = metrics_of()
    metrics.finished(
        finished(FinishReason.ABORT, scheduled=0.0, first_output=0.0, last_output=10.0, num_output_tokens=0)
    )
    shown = samples(metrics)
    assert {shown[f"request_{name}_time_seconds_count"] for name in ("queue", "prefill", "decode", "inference")} == {0}


def test_histograms_of_the_engine_are_cumulative():
    histogram = Histogram.with_bounds((1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 50.0, 60.0):
        histogram.add(value)
    shown = samples(metrics_of(stats(step_tokens=histogram)))
    assert [shown[f"iteration_tokens_total_bucket[0][{bound}]"] for bound in ("1.0", "10.0", "+Inf")] == [2, 3, 5]
    assert (shown["iteration_tokens_total_count[0]"], shown["iteration_tokens_total_sum[0]"]) == (5, 116.5)


def test_latencies_are_per_token():
    metrics = metrics_of()
    metrics.first_token(0.3)
    metrics.next_tokens(4, 0.2)
    shown = samples(metrics)
    assert shown["time_to_first_token_seconds_sum"] == 0.3
    assert shown["inter_token_latency_seconds_sum"] == 0.05


def test_two_servers_in_one_process_do_not_share_metrics():
    one, other = metrics_of(), metrics_of()
    one.first_token(1.0)
    assert samples(other)["time_to_first_token_seconds_count"] == 0


def test_every_query_of_the_dashboard_names_a_metric_that_exists():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [entry["query"]["query"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"]
    assert len(queries) > 20
    there = exposed(busy_metrics())
    for query in queries:
        names = re.findall(r"tokenmill:\w+", query)
        assert names, query
        assert set(names) <= there, query
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})


def test_throughput_is_told_only_while_there_is_some():
    log = ThroughputLog()
    assert log.line(stats(), 10) is None
    line = log.line(stats(prompt_tokens=100, generation_tokens=50, num_running=2, num_pages_pinned=10), 10)
    assert line == "running 2, waiting 0, prompt 10.0 tok/s, output 5.0 tok/s, KV 10.0%, prefix cache hits 0.0%"
    assert log.line(stats(prompt_tokens=100, generation_tokens=50), 10) is None
    line = log.line(stats(generation_tokens=70, num_draft_tokens=20, num_accepted_tokens=15), 10)
    assert line is not None
    assert line.endswith("prefix cache hits 0.0%, drafts right 75.0% of 2.0 tok/s")


@pytest.mark.parametrize("as_json", [False, True])
def test_lines_are_text_or_objects(as_json):
    lines = []
    EventLog(lines.append, as_json).note("request", "x: done", id='x"\n', seconds=0.5)
    assert len(lines) == 1
    if as_json:
        line = json.loads(lines[0])
        assert line.pop("time") > 1e9
        assert line == {"event": "request", "message": "x: done", "id": 'x"\n', "seconds": 0.5}
        assert "\n" not in lines[0]
    else:
        assert lines == ["x: done"]


@pytest.fixture
def collector():
    """A collector that keeps what is posted to it; `status` is what it answers."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(
                (
                    self.path,
                    self.headers["Content-Type"],
                    json.loads(self.rfile.read(int(self.headers["Content-Length"]))),
                )
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    server.server_close()


def test_a_collector_gets_a_span_for_each_request(collector):
    url, received = collector

    async def run():
        exporter = TraceExporter(url, "mill")
        metrics = metrics_of(traces=exporter)
        metrics.finished(finished())
        metrics.finished(finished(FinishReason.ERROR, scheduled=0.0, first_output=0.0))
        task = asyncio.ensure_future(exporter.run())
        await eventually_async(lambda: received)
        task.cancel()

    asyncio.run(run())
    ((path, kind, body),) = received
    assert (path, kind) == ("/v1/traces", "application/json")
    first, second = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert re.fullmatch("[0-9a-f]{32}", first["traceId"])
    assert re.fullmatch("[0-9a-f]{16}", first["spanId"])
    assert first["traceId"] != second["traceId"]
    assert int(first["endTimeUnixNano"]) - int(first["startTimeUnixNano"]) == pytest.approx(15e9, abs=1e3)
    values = {entry["key"]: next(iter(entry["value"].values())) for entry in first["attributes"]}
    assert values["gen_ai.usage.completion_tokens"] == "19", "OTLP's JSON writes integers as strings"
    assert values["gen_ai.latency.time_in_queue"] == 2.0
    assert (first["status"], second["status"]) == ({}, {"code": 2})


def spans_of(collector, requests):
    """Return the spans that the collector gets for these finished requests."""
    url, received = collector

    async def run():
        exporter = TraceExporter(url, "mill")
        for request in requests:
            exporter.add(request)
        task = asyncio.ensure_future(exporter.run())
        await eventually_async(lambda: received)
        task.cancel()

    asyncio.run(run())
    return received[0][2]["resourceSpans"][0]["scopeSpans"][0]["spans"]


def test_a_request_of_a_trace_is_a_part_of_it(collector):
    trace, parent = "ab" * 16, "cd" * 8
    sampled, other, broken = (f"00-{trace}-{parent}-{flags}" for flags in ("01", "00", "xx"))
    spans = spans_of(collector, [finished(trace=one, label=one) for one in (sampled, other, broken)])
    first, last = spans
    assert (first["traceId"], first["parentSpanId"]) == (trace, parent)
    assert last["traceId"] != trace, "what is no traceparent begins a trace of its own"
    assert "parentSpanId" not in last
    values = {entry["key"]: next(iter(entry["value"].values())) for entry in first["attributes"]}
    phases = ("prefill", "decode", "inference")
    assert [values[f"gen_ai.latency.time_in_model_{phase}"] for phase in phases] == [3.0, 9.0, 12.0]


def test_a_collector_that_is_away_costs_nothing_but_its_spans():
    async def run():
        exporter = TraceExporter("http://127.0.0.1:9/v1/traces", "mill")
        for _ in range(10_000):
            exporter.add(finished())
        task = asyncio.ensure_future(exporter.run())
        await asyncio.sleep(1.3)
        assert not task.done()
        task.cancel()

    asyncio.run(run())


def test_deaths_of_parts_and_lost_messages_are_counted_by_part() -> None:
    found = samples(Metrics([engine()], PartCounts({"api": 2}, {"engine-0": 3}, {"worker": 4})))
    assert found["messages_dropped_total[api]"] == 2
    assert found["restarts_total[engine-0]"] == 3
    assert found["log_lines_lost_total[worker]"] == 4
