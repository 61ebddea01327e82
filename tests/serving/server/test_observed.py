"""A running server as those who watch it see it: metrics for dashboards, spans for a collector, lines for a log."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.observe.test_metrics import DASHBOARD, collector  # noqa: F401 - a fixture
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

TRACE = "00-" + "12" * 16 + "-" + "34" * 8 + "-01"
CHAT = {
    "messages": [{"role": "user", "content": "the same words each time: pages are shared"}],
    "max_tokens": 9,
}
NUM_REQUESTS = 7
FUNCTIONS = {"sum", "avg", "rate", "histogram_quantile", "by", "label_values"}


@pytest.fixture(scope="module")
def server(tiny_checkpoint):
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="float32", num_pages=48, page_size=8, max_num_seqs=4)
    with start_server(engine, ENGINE_MODULE, metrics_prefix="vllm") as running:
        replies = [running.post("/v1/chat/completions", CHAT | {"ignore_eos": True}).json() for _ in range(3)]
        replies.append(running.post("/v1/completions", {"prompt": [5] * 30, "n": 3, "max_tokens": 4}).json())
        with running.http.stream("POST", f"{running.url}/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
            next(reply.iter_lines())
        running.wait_until_unused()
        running.wait_for(lambda: running.metric("request_success_total") == NUM_REQUESTS)
        running.usages = [reply["usage"] for reply in replies]
        yield running


def shown(server) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and value of every sample of /metrics, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(server.http.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.mark.parametrize("prefix", ["tokenmill", "vllm"])
def test_every_expression_of_the_dashboard_asks_for_what_is_there(server, prefix):
    dashboard = json.loads(DASHBOARD.read_text().replace("tokenmill:", f"{prefix}:"))
    there = shown(server)
    for panel in dashboard["panels"]:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]
        for target in panel["targets"]:
            expression = target["expr"]
            names = re.findall(rf"{prefix}:\w+", expression)
            assert names, expression
            assert set(names) <= set(there), expression
            labels = {label for name in names for labels, _ in there[name] for label in labels}
            grouped = {label.strip() for group in re.findall(r"by \((.*?)\)", expression) for label in group.split(",")}
            selected = set(re.findall(r"(\w+)=~", expression)) - {"instance"}
            assert grouped | selected <= labels, expression
            assert expression.count("(") == expression.count(")"), expression
            words = set(re.findall(r"(?<![\w:$])([a-z_]+)(?= ?\()", expression))
            assert words <= FUNCTIONS, "what else is called should be looked at by a person once"


def test_the_variables_of_the_dashboard_are_its_own():
    dashboard = json.loads(DASHBOARD.read_text())
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
    assert used - names <= {"__rate_interval"}
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] in ("timeseries", "stat", "gauge", "heatmap")


def test_the_numbers_are_those_that_clients_were_told(server):
    there = shown(server)

    def total(name: str, **labels: str) -> float:
        return sum(value for given, value in there[f"tokenmill:{name}"] if labels.items() <= given.items())

    told = {name: sum(usage[name] for usage in server.usages) for name in ("prompt_tokens", "completion_tokens")}
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in server.usages)
    assert cached > 0
    by_reason = {reason: total("request_success_total", finished_reason=reason) for reason in ("length", "stop")}
    assert by_reason["length"] + by_reason["stop"] >= 6
    assert total("request_success_total", finished_reason="abort") <= 1
    assert total("request_success_total", finished_reason="error") == 0
    num_requests = total("request_success_total")
    assert num_requests == NUM_REQUESTS
    assert total("e2e_request_latency_seconds_count") == num_requests
    assert total("time_to_first_token_seconds_count") == num_requests
    assert total("generation_tokens_total") >= told["completion_tokens"]
    assert total("prompt_tokens_total") >= told["prompt_tokens"]
    assert total("prefix_cache_hits_total") >= cached
    assert total("prefix_cache_queries_total") > total("prefix_cache_hits_total")
    assert 0 < total("request_queue_time_seconds_sum") < total("e2e_request_latency_seconds_sum")
    phases = total("request_prefill_time_seconds_sum") + total("request_decode_time_seconds_sum")
    assert total("request_inference_time_seconds_sum") == pytest.approx(phases)
    steps = {part: total("step_seconds_count", part=part) for part in ("schedule", "run", "commit")}
    assert len(set(steps.values())) == 1
    assert total("iteration_tokens_total_count") == steps["run"]
    assert total("kv_cache_usage_perc") == 0
    assert total("cache_config_info", num_gpu_blocks="48", block_size="8") == 1


def test_spans_and_lines_are_of_the_same_calls(tiny_checkpoint, collector):  # noqa: F811
    url, received = collector
    engine = EngineConfig(model=str(tiny_checkpoint), num_pages=48, page_size=8)
    how = {"otlp_traces_endpoint": url, "log_format": "json", "enable_log_requests": True}
    with start_server(engine, ENGINE_MODULE, **how) as running:
        for number in range(3):
            headers = {"X-Request-Id": f"mine-{number}"} | ({"traceparent": TRACE} if number == 1 else {})
            reply = running.post("/v1/chat/completions", CHAT, headers=headers)
            assert reply.headers["x-request-id"] == f"mine-{number}"
        running.post("/v1/completions", {"prompt": "x", "timeout": 1e-9, "request_id": "late"})
        running.wait_for(lambda: len(spans(received)) >= 4)
        lines = [json.loads(line) for line in running.output().splitlines() if line.startswith("{")]
    told = {line["id"]: line for line in lines if line["event"] == "request"}
    labels = [f"chatcmpl-mine-{number}" for number in range(3)]
    assert [told[label]["outcome"] for label in labels] == ["done"] * 3
    assert told["cmpl-late"]["outcome"].startswith("failed: ")
    by_label = {span["values"]["gen_ai.request.id"]: span for span in spans(received)}
    assert set(by_label) == {*labels, "cmpl-late"}
    for label in labels:
        assert by_label[label]["values"]["gen_ai.usage.completion_tokens"] == str(told[label]["completion_tokens"])
    child, other = by_label[labels[1]], by_label[labels[2]]
    assert f"00-{child['traceId']}-{child['parentSpanId']}-01" == TRACE
    assert "parentSpanId" not in other


def spans(received) -> list[dict]:
    """Return the collector's spans, with the attributes of each as `values`."""
    found = []
    for _, _, body in received:
        for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            values = {entry["key"]: next(iter(entry["value"].values())) for entry in span["attributes"]}
            found.append(span | {"values": values})
    return found
