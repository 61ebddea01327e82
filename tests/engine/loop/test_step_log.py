"""Record and replay: the same arrivals and outcomes give the same plans, and a difference is found."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from pathlib import Path

import msgspec
import pytest

from tests.engine.scheduler.drafters import HalfRightDrafter
from tests.engine.scheduler.harness import Harness
from tests.full_disk import room_for
from tests.seeding import seed_for
from tokenmill.core.errors import TokenMillError
from tokenmill.core.request import RequestStatus
from tokenmill.engine.loop.step_log import LogHeader, News, StepLog, StepRecord, _payloads, read_log
from tokenmill.lab.simulate.replay import replay

SEED = seed_for(__name__)


def record_traffic(path: Path, depth: int, drafts: int = 0) -> Harness:
    """A busy while with everything in it: preemptions, aborts, equal prompts, sessions, failures, a cache reset."""
    harness = Harness(depth=depth, num_pages=9, budget=10, drafts=drafts, log=path)
    generator = random.Random(SEED)
    harness.runner.failing_steps = {15}
    for number in range(30):
        prompt = [generator.randrange(3) for _ in range(generator.randint(1, 14))]
        harness.add(prompt, generator.randint(1, 9), priority=generator.randint(0, 2))
        if number % 3 == 0:
            harness.engine.iterations()  # somebody watches
        if number == 4:
            harness.open_session(prompt, 3)
        if number == 6:
            held = harness.add(prompt, 2, status=RequestStatus.WAITING_FOR_GRAMMAR)
        if number == 12:
            harness.engine.wake(held)
        if number == 20:
            harness.engine.reset_prefix_cache(preempt_running=True)
        for _ in range(generator.randint(0, 3)):
            harness.step()
        for session in harness.sessions:
            harness.extend(session, [1, 2], 2, is_last=number > 25)
        if number % 7 == 0:
            harness.abort(str(generator.randrange(number + 1)))
    for token in range(3):  # whatever was drawn: these begin together, and have no room to end together
        harness.add([token] * 8, 9)
    harness.drain()
    harness.engine.close()
    return harness


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_replay_makes_every_plan_again(tmp_path: Path, depth: int, drafts: int) -> None:
    harness = record_traffic(tmp_path / "log", depth, drafts)
    assert any(plan.draft_ids is not None for plan in harness.runner.plans) == bool(drafts)
    assert harness.scheduler.state.num_preemptions > 0
    outcome = replay(tmp_path / "log", HalfRightDrafter(drafts) if drafts else None)
    assert outcome.difference is None, f"seed {SEED}"
    assert outcome.num_plans == len(harness.runner.plans)


def test_the_first_difference_is_told(tmp_path: Path) -> None:
    record_traffic(tmp_path / "log", depth=1)
    header, records = read_log(tmp_path / "log")
    changed = list(records)
    victim = next(record for record in changed if record.plan and record.plan["step"] == 5)
    assert victim.plan is not None
    victim.plan["num_scheduled"][0] += 1
    with StepLog(tmp_path / "changed", header) as log:
        for record in changed:
            log._write(record)
    outcome = replay(tmp_path / "changed")
    assert outcome.difference is not None
    assert outcome.difference.startswith("step 5: num_scheduled: recorded ")


def test_a_log_cut_off_by_a_kill_replays_up_to_there(tmp_path: Path) -> None:
    record_traffic(tmp_path / "log", depth=1)
    data = (tmp_path / "log").read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    assert replay(tmp_path / "cut").difference is None


@pytest.mark.parametrize("content", [b"", b"hello", b"\0\0\0\1\x01"])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(TokenMillError, match="is not a step log"):
        replay(tmp_path / "file")


def test_a_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    harness = Harness()
    with pytest.raises(TokenMillError, match=r"--step-log .*: No such file"):
        StepLog(tmp_path / "no folder" / "log", harness.header)


def test_a_full_disk_ends_the_log_and_not_the_engine() -> None:
    harness = Harness(log=Path("/dev/full"))
    harness.add([1, 2, 3], max_tokens=3)
    harness.drain()


def test_at_any_byte_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    record_traffic(tmp_path / "log", depth=1)
    whole = list(_payloads((tmp_path / "log").read_bytes()))
    size, generator = (tmp_path / "log").stat().st_size, random.Random(SEED)
    for room in [len(whole[0]), *(generator.randrange(size) for _ in range(10))]:
        with room_for(room):
            record_traffic(tmp_path / "cut", depth=1)
        cut = list(_payloads((tmp_path / "cut").read_bytes()))
        assert sum(4 + len(payload) for payload in cut) == (tmp_path / "cut").stat().st_size, f"seed {SEED}"
        assert bool(cut) == (room >= 4 + len(whole[0]))
        assert len(cut) < len(whole)
        assert list(map(plan_of, cut[1:])) == list(map(plan_of, whole[1 : len(cut)])), f"seed {SEED}, room {room}"


def plan_of(payload: bytes) -> object:
    return msgspec.msgpack.decode(payload, type=StepRecord).plan


def test_a_pipe_that_nobody_reads_holds_up_no_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    thread = threading.Thread(target=record_traffic, args=(tmp_path / "log", 1), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "the step log ends here" in caplog.text
    os.close(reader)


def test_only_the_last_thousand_records_stay_in_memory() -> None:
    log = StepLog()
    for _ in range(1500):
        log.add(None, None, StepRecord(error="something to record"), News())
    assert len(list(log.recent())) == 1000


def test_the_header_holds_what_a_scheduler_starts_from(tmp_path: Path) -> None:
    harness = Harness(log=tmp_path / "log", policy="priority")
    harness.engine.close()
    header, records = read_log(tmp_path / "log")
    assert isinstance(header, LogHeader)
    assert header.scheduler.policy == "priority"
    assert list(records) == []
