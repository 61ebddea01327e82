from prometheus_client.parser import text_string_to_metric_families

from tests.frontend.test_text_processor import ready
from tokenmill.messages import EngineStats
from tokenmill.observe.metrics import Metrics
from tokenmill.observe.throughput import ThroughputLog
from tokenmill.request import FinishReason


def stats(**changes) -> EngineStats:
    fields = dict.fromkeys(EngineStats.__struct_fields__, 0) | {"num_pages": 100}
    return EngineStats(**(fields | changes))


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        sample.name.removeprefix("tokenmill:") + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


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


def test_requests_are_counted_by_how_they_ended():
    metrics = Metrics()
    metrics.finished(FinishReason.STOP, 0.5, 10, 20)
    metrics.finished(FinishReason.STOP, 0.5, 10, 20)
    metrics.finished(FinishReason.ABORT, 0.1, 10, 0)
    shown = samples(metrics)
    assert {reason: shown[f"request_success_total[{reason}]"] for reason in FinishReason} == {
        "stop": 2, "length": 0, "abort": 1, "error": 0,
    }  # fmt: skip
    assert shown["e2e_request_latency_seconds_count"] == 3
    assert shown["request_generation_tokens_sum"] == 40


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


def test_throughput_is_told_only_while_there_is_some():
    log = ThroughputLog()
    assert log.line(None, 10) is None
    line = log.line(stats(prompt_tokens=100, generation_tokens=50, num_running=2, num_pages_pinned=10), 10)
    assert line == "running 2, waiting 0, prompt 10.0 tok/s, output 5.0 tok/s, KV 10.0%, prefix cache hits 0.0%"
    assert log.line(stats(prompt_tokens=100, generation_tokens=50), 10) is None
