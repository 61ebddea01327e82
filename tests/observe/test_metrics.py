import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.frontend.test_text_processor import ready
from tokenmill.frontend.client import FinishedRequest
from tokenmill.messages import EngineStats
from tokenmill.observe.event_log import EventLog
from tokenmill.observe.metrics import Metrics
from tokenmill.observe.throughput import ThroughputLog
from tokenmill.observe.traces import TraceExporter
from tokenmill.request import FinishReason
from tokenmill.tally import SECONDS, Tally

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"

# The list of the surface that users know: what existing dashboards and alerts ask for.
NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "iteration_tokens_total_bucket",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "cache_config_info",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "step_seconds_bucket",
]


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


def busy_metrics(**how) -> Metrics:
    """Of a server that has done a little of everything."""
    metrics = Metrics(**how)
    metrics.engine_ready(ready(num_pages=64))
    tally = Tally.of(SECONDS)
    tally.add(0.002)
    metrics.engine_stats(
        stats(waiting_by_reason={"capacity": 1}, step_tokens=tally, step_seconds={"schedule": tally, "run": tally})
    )
    metrics.first_token(0.1)
    metrics.next_tokens(1, 0.1)
    metrics.finished(finished())
    return metrics


def exposed(metrics: Metrics) -> set[str]:
    text = metrics.exposition().decode()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def test_the_engines_latest_numbers_are_shown():
    metrics = Metrics()
    metrics.engine_stats(stats(num_running=1))
    metrics.engine_stats(stats(num_running=3, num_waiting=2, num_pages_pinned=25, prompt_tokens=7, prefix_hits=4))
    shown = samples(metrics)
    assert shown["num_requests_running"] == 3
    assert shown["num_requests_waiting"] == 2
    assert shown["kv_cache_usage_perc"] == 0.25
    assert shown["prompt_tokens_total"] == 7
    assert shown["prefix_cache_hits_total"] == 4


def test_before_the_first_step_all_is_zero():
    metrics = Metrics()
    metrics.engine_ready(ready(num_pages=64))
    shown = samples(metrics)
    assert (shown["num_requests_running"], shown["num_pages"]) == (0, 64)


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
    metrics = Metrics()
    for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.ABORT):
        metrics.finished(finished(reason))
    shown = samples(metrics)
    assert {reason: shown[f"request_success_total[{reason}]"] for reason in FinishReason} == {
        "stop": 2, "length": 0, "abort": 1, "error": 0,
    }  # fmt: skip
    assert shown["e2e_request_latency_seconds_count"] == 3


def test_the_parts_of_requests_add_up_whoever_left_in_between():
    metrics = Metrics()
    metrics.finished(finished())
    metrics.finished(finished(FinishReason.ABORT, scheduled=0.0))
    metrics.finished(finished(FinishReason.ABORT, scheduled=0.0, first_output=0.0, last_output=10.0))
    shown = samples(metrics)
    parts = [shown[f"request_{part}_time_seconds_sum"] for part in ("prefill", "decode", "inference")]
    assert parts == [3.0, 9.0, 12.0]
    assert shown["request_generation_tokens_sum"] == 57


def test_a_request_is_cut_into_its_phases():
    metrics = Metrics()
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
    metrics = Metrics()
    metrics.finished(
        finished(FinishReason.ABORT, scheduled=0.0, first_output=0.0, last_output=10.0, num_output_tokens=0)
    )
    shown = samples(metrics)
    assert {shown[f"request_{name}_time_seconds_count"] for name in ("queue", "prefill", "decode", "inference")} == {0}


def test_histograms_of_the_engine_are_cumulative():
    tally = Tally.of((1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 50.0, 60.0):
        tally.add(value)
    metrics = Metrics()
    metrics.engine_stats(stats(step_tokens=tally))
    shown = samples(metrics)
    assert [shown[f"iteration_tokens_total_bucket[{bound}]"] for bound in ("1.0", "10.0", "+Inf")] == [2, 3, 5]
    assert (shown["iteration_tokens_total_count"], shown["iteration_tokens_total_sum"]) == (5, 116.5)


def test_latencies_are_per_token():
    metrics = Metrics()
    metrics.first_token(0.3)
    metrics.next_tokens(4, 0.2)
    shown = samples(metrics)
    assert shown["time_to_first_token_seconds_sum"] == 0.3
    assert shown["inter_token_latency_seconds_sum"] == 0.05


def test_two_servers_in_one_process_do_not_share_metrics():
    one, other = Metrics(), Metrics()
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
    assert log.line(None, 10) is None
    line = log.line(stats(prompt_tokens=100, generation_tokens=50, num_running=2, num_pages_pinned=10), 10)
    assert line == "running 2, waiting 0, prompt 10.0 tok/s, output 5.0 tok/s, KV 10.0%, prefix cache hits 0.0%"
    assert log.line(stats(prompt_tokens=100, generation_tokens=50), 10) is None


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
        metrics = Metrics(traces=exporter)
        metrics.finished(finished())
        metrics.finished(finished(FinishReason.ERROR, scheduled=0.0, first_output=0.0))
        task = asyncio.ensure_future(exporter.run())
        while not received:
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 10))
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
    """What the collector gets for these finished requests."""
    url, received = collector

    async def run():
        exporter = TraceExporter(url, "mill")
        for request in requests:
            exporter.add(request)
        task = asyncio.ensure_future(exporter.run())
        while not received:
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 10))
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
