"""`tokenmill steps`: every form of a log says the same."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.loop.test_step_log import record_traffic
from tokenmill.cli.main import main
from tokenmill.engine.loop.step_log import read_log

# Requests of the traffic that is recorded.
ARRIVED = 35


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "log"
    harness = record_traffic(path, depth=2)
    assert len(harness.records) == ARRIVED
    return path


def output(capsys: pytest.CaptureFixture[str], log: Path, form: str) -> str:
    assert main(["steps", str(log), "--format", form]) == 0
    return capsys.readouterr().out


def test_jsonl_has_all_of_the_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in output(capsys, log, "jsonl").splitlines()]
    header, records = read_log(log)
    assert lines[0]["num_pages"] == header.num_pages
    for line, record in zip(lines[1:], records, strict=True):
        assert line.get("plan") == record.plan
        assert line.get("token_ids", []) == record.token_ids
        assert [one["type"] for one in line.get("events", [])] == [type(one).__name__ for one in record.inputs]


def test_csv_has_the_numbers_of_each_record(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(output(capsys, log, "csv"))))
    clock = 0.0
    for row, record in zip(rows, read_log(log)[1], strict=True):
        plan = record.plan or {"num_scheduled": [], "request_ids": [], "new_rows": [], "step": ""}
        assert row["step"] == str(plan["step"])
        assert (int(row["requests"]), int(row["tokens"])) == (len(plan["request_ids"]), sum(plan["num_scheduled"]))
        assert (int(row["admitted"]), int(row["brought"])) == (len(plan["new_rows"]), len(record.token_ids))
        assert float(row["at"]) == pytest.approx(clock + record.rest)
        assert row["error"] == (record.error or "")
        clock = float(row["at"]) + float(row["schedule"]) + float(row["run"]) + float(row["commit"])
    assert sum(int(row["arrived"]) for row in rows) == ARRIVED
    assert any(row["error"] for row in rows)


def test_a_trace_has_slices_that_nest_and_lanes_that_close(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = json.loads(output(capsys, log, "perfetto"))["traceEvents"]
    records = list(read_log(log)[1])
    slices = [event for event in events if event["ph"] == "X"]
    steps = [event for event in slices if event["name"].startswith(("step ", "iteration "))]
    assert len(steps) == len(records)
    for number, step in enumerate(steps):
        parts = slices[4 * number + 1 : 4 * number + 4]
        assert [part["name"] for part in parts] == ["schedule", "run", "commit"]
        assert sum(part["dur"] for part in parts) == pytest.approx(step["dur"], abs=0.01)
        assert step["ts"] <= parts[0]["ts"] < step["ts"] + step["dur"] + 0.01
    kinds = Counter((event["ph"], event["name"]) for event in events if "id" in event)
    assert kinds[("b", "waits")] == kinds[("e", "waits")] == ARRIVED
    assert 0 < kinds[("b", "runs")] == kinds[("e", "runs")] <= ARRIVED
    again = sum(len(record.plan["new_rows"]) for record in records if record.plan) - kinds[("b", "runs")]
    assert kinds[("n", "back after a preemption")] == again > 0
    spans = {(event["id"], event["name"], event["ph"]): event["ts"] for event in events if "id" in event}
    for (request, name, kind), at in spans.items():
        if kind == "b":
            assert at <= spans[(request, name, "e")]


def test_the_text_is_a_line_a_turn(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, log, "text").splitlines()
    header, records = read_log(log)
    assert lines[0].startswith(f"{header.num_pages} pages of {header.page_size} tokens")
    assert len(lines) == 2 + len(list(records))


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("hello")
    assert main(["steps", str(tmp_path / "log")]) == 1
    assert "is not a step log" in capsys.readouterr().err
