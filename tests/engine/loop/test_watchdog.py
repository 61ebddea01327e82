"""A scheduler that does nothing although it could is noticed, once, and its last steps are kept."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.engine.scheduler.harness import Harness
from tests.full_disk import room_for
from tokenmill.core.request import RequestStatus


def test_a_stuck_scheduler_is_reported_once_with_its_last_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(watchdog=tmp_path)
    harness.add([1, 2, 3], max_tokens=5)
    harness.step()
    harness.step()
    monkeypatch.setattr(harness.scheduler, "schedule", lambda: None)
    for _ in range(3):
        harness.engine.step()
    assert caplog.text.count("no request makes progress") == 1
    (dump,) = tmp_path.iterdir()
    records = [json.loads(line) for line in dump.read_text().splitlines()]
    assert [record["plan"]["step"] for record in records] == [1, 2]


def test_requests_that_wait_and_could_start_count_as_stuck_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(watchdog=tmp_path)
    harness.add([1, 2, 3])
    monkeypatch.setattr(harness.scheduler, "schedule", lambda: None)
    harness.engine.step()
    assert "no request makes progress" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_second_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(watchdog=tmp_path / "no folder")
    harness.add([1, 2, 3])
    monkeypatch.setattr(harness.scheduler, "schedule", lambda: None)
    harness.engine.step()
    assert "could not be written" in caplog.text


def test_a_full_disk_keeps_no_part_of_the_last_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(watchdog=tmp_path)
    harness.add([1, 2, 3], max_tokens=5)
    harness.step()
    monkeypatch.setattr(harness.scheduler, "schedule", lambda: None)
    with room_for(random.randrange(100)):
        for _ in range(3):
            harness.engine.step()
    assert "could not be written: File too large" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_waiting_for_something_from_outside_is_no_reason_to_bark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(watchdog=tmp_path)
    harness.add([1, 2, 3], status=RequestStatus.WAITING_FOR_GRAMMAR)
    harness.step()
    assert harness.engine.is_idle
    assert not caplog.text
    assert not list(tmp_path.iterdir())
