"""`tokenmill replay`: what it prints and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.loop.test_step_log import record_traffic
from tokenmill.cli.main import main
from tokenmill.engine.loop.step_log import StepLog, read_log


def test_an_honest_log_is_confirmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness = record_traffic(tmp_path / "log", depth=2)
    assert main(["replay", str(tmp_path / "log")]) == 0
    assert capsys.readouterr().out == f"{len(harness.runner.plans)} plans, all identical\n"


def test_a_changed_log_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_traffic(tmp_path / "log", depth=1)
    header, records = read_log(tmp_path / "log")
    with StepLog(tmp_path / "changed", header) as log:
        for record in records:
            if record.plan is not None and record.plan["step"] == 3:
                record.plan["page_ids"] = [*record.plan["page_ids"], 1]
            log._write(record)
    assert main(["replay", str(tmp_path / "changed")]) == 1
    assert "after 2 identical plans: step 3: page_ids: recorded" in capsys.readouterr().out


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("hello")
    assert main(["replay", str(tmp_path / "log")]) == 1
    assert "is not a step log" in capsys.readouterr().err


def test_other_policies_are_put_beside_the_recorded_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_traffic(tmp_path / "log", depth=1)
    flags = ["--policy", "priority", "--policy", "fair", "--admission", "reserve"]
    assert main(["replay", str(tmp_path / "log"), *flags]) == 0
    rows = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["policy"] == ["fcfs", "priority", "fair"]
    assert rows["admission"] == ["whole-prompt", "reserve", "reserve"]
    assert len(rows["preemptions"]) == len(rows["s to first token, p99"]) == 3
    assert all(int(steps.replace(",", "")) > 10 for steps in rows["steps"])
    assert main(["replay", str(tmp_path / "log"), "--policy", "nothing"]) == 2
