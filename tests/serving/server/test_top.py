"""`tokenmill top`: the numbers of a real server, and what a frame makes of two samples."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from tests.serving.server.running_server import RunningServer
from tokenmill.cli.main import main
from tokenmill.cli.top import Sample, View, bar, read_sample, sparks

BEFORE = """
tokenmill:num_pages{engine="0"} 60.0
tokenmill:generation_tokens_total{engine="0"} 100.0
tokenmill:engine_steps_total{engine="0"} 10.0
tokenmill:iteration_tokens_total_sum{engine="0"} 100.0
tokenmill:step_seconds_count{engine="0",part="run"} 10.0
tokenmill:step_seconds_sum{engine="0",part="run"} 1.0
tokenmill:prefix_cache_queries_total{engine="0"} 1000.0
tokenmill:prefix_cache_hits_total{engine="0"} 250.0
"""
AFTER = """
tokenmill:num_requests_running{engine="0"} 2.0
tokenmill:num_requests_running{engine="1"} 3.0
tokenmill:num_requests_waiting{engine="0"} 4.0
tokenmill:num_requests_waiting_by_reason{engine="0",reason="same_prompt"} 1.0
tokenmill:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0
tokenmill:num_requests_waiting_by_reason{engine="0",reason="grammar"} 0.0
tokenmill:num_pages{engine="0"} 60.0
tokenmill:num_pages_pinned{engine="0"} 30.0
tokenmill:num_pages_evictable{engine="0"} 10.0
tokenmill:generation_tokens_total{engine="0"} 150.0
tokenmill:engine_steps_total{engine="0"} 20.0
tokenmill:iteration_tokens_total_sum{engine="0"} 180.0
tokenmill:iteration_tokens_total_bucket{engine="0",le="1.0"} 77.0
tokenmill:step_seconds_count{engine="0",part="run"} 20.0
tokenmill:step_seconds_sum{engine="0",part="run"} 1.4
tokenmill:prefix_cache_queries_total{engine="0"} 1000.0
tokenmill:prefix_cache_hits_total{engine="0"} 250.0
tokenmill:request_success_total{finished_reason="stop"} 7.0
process_open_fds 9.0
"""


def shown(before: Sample, after: Sample) -> dict[str, str]:
    """The lines of a frame by label."""
    console = Console(file=io.StringIO(), width=140)
    console.print(View("http://server", before).frame(after))
    lines = console.file.getvalue().splitlines()[1:-1]
    return {line[2:13].strip(): line[15:].rstrip("│ ") for line in lines}


def test_a_frame_tells_rates_between_two_looks_and_the_state_of_the_second() -> None:
    before, after = (Sample(seconds, read_sample(text).values) for seconds, text in ((5.0, BEFORE), (7.0, AFTER)))
    frame = shown(before, after)
    assert frame["running"].startswith("5 requests")
    assert frame["waiting"] == "4: 1 for same prompt, 3 for capacity"
    assert frame["pages"] == "█" * 15 + "▒" * 5 + "░" * 10 + " 30 used, 10 cached, of 60"
    assert frame["tokens/s"] == "25.0 generated, 0.0 of prompts"
    assert frame["cache hits"] == "25% of 1,000 prompt tokens"
    assert frame["steps"] == "5.0 a second, 8.0 tokens each: schedule -, run 40.0 ms, commit -"
    assert frame["ended"] == "7 stop"
    assert "drafts" not in frame, "without speculation nothing is said of it"
    drafted = {("spec_decode_num_draft_tokens_total", ""): 40.0, ("spec_decode_num_accepted_tokens_total", ""): 30.0}
    frame = shown(before, Sample(7.0, after.values | drafted))
    assert frame["drafts"] == "75% right of 20.0 tokens a second"


def test_a_server_that_does_nothing_divides_by_nothing() -> None:
    empty = Sample(1.0, {})
    frame = shown(empty, empty)
    assert frame["waiting"] == "0"
    assert frame["cache hits"] == "no prompts yet"
    assert frame["first token"] == "-, then -"


def test_bars_never_exceed_their_width() -> None:
    assert [bar(*pages) for pages in ((0, 0, 0), (60, 60, 60), (1, 59, 60))] == ["░" * 30, "█" * 30, "█" * 0 + "▒" * 30]
    assert sparks([0, 1, 2]) == " ▄█"
    assert sparks([0.0]) == " "


def test_one_frame_of_a_real_server(echo_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    model = echo_server.http.get(echo_server.url + "/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "a b c d e f g h", "max_tokens": 5}
    echo_server.post("/v1/completions", body)
    sender = threading.Thread(target=echo_server.post, args=("/v1/completions", body))
    sender.start()
    assert main(["top", "--url", echo_server.url, "--once", "--interval", "0.3"]) == 0
    sender.join()
    output = capsys.readouterr().out
    for label in ("running", "waiting", "pages", "tokens/s", "cache hits", "steps", "first token", "ended"):
        assert f" {label} " in output
    assert f"of {echo_server.metric('num_pages'):,.0f}" in output


def test_what_is_no_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "no server answers" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["top", "--interval", "0"])
