"""Jobs that harm nobody, and processes that are killed and stopped: no job is blamed for that."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.eventually import eventually
from tests.ipc.sandbox_job import LIMITS, MODULE
from tests.serving.server.running_server import REPOSITORY, children_of, is_alive
from tokenmill.core.errors import Unavailable
from tokenmill.ipc import sandbox as module
from tokenmill.ipc.sandbox import Limits, Outcome, Sandbox

SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture(autouse=True)
def repository_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes find the jobs of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(MODULE, [], LIMITS)
    yield sandbox
    sandbox.close()
    assert not zombies()


def zombies() -> list[int]:
    return [pid for pid, command in children_of(os.getpid()).items() if not is_alive(pid) and command == []]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def has_begun(path: Path) -> tuple[int, int]:
    """Wait for a job that tells of itself: its process and its fork."""
    eventually(path.exists)
    process, fork = path.read_text().split()
    return int(process), int(fork)


@pytest.mark.parametrize(
    ("job", "outcome", "data"),
    [
        (b"echo hello", Outcome.DONE, b"hello"),
        (b"echo", Outcome.DONE, b""),
        (b"refuse no such thing", Outcome.REFUSED, b"no such thing"),
        (b"raise", Outcome.CRASHED, b""),
        (b"spin", Outcome.TOO_SLOW, b""),
        (b"eat", Outcome.CRASHED, b""),
        (b"kill %d" % signal.SIGSEGV, Outcome.CRASHED, b""),
        (b"kill %d" % signal.SIGABRT, Outcome.CRASHED, b""),
        (b"write", Outcome.DONE, b"done"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) and value else None,
)
def test_an_outcome_is_the_jobs_own(sandbox: Sandbox, job: bytes, outcome: Outcome, data: bytes) -> None:
    sandbox.ask(b"echo")
    before = sandbox.pids
    assert sandbox.ask(job) == (outcome, data)
    assert sandbox.ask(b"echo still there") == (Outcome.DONE, b"still there")
    assert sandbox.pids == before


def test_inputs_and_outputs_may_be_large(sandbox: Sandbox) -> None:
    data = random.randbytes(20 << 20)
    assert sandbox.ask(b"echo " + data).data == data


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("size", [0, 5 << 20])
def test_an_idle_process_that_is_killed_or_stopped_is_replaced(sandbox: Sandbox, number: int, size: int) -> None:
    sandbox.ask(b"echo")
    (before,) = sandbox.pids
    os.kill(before, number)
    assert sandbox.ask(b"echo " + bytes(size)) == (Outcome.DONE, bytes(size))
    assert before not in sandbox.pids
    assert not is_alive(before)


@pytest.mark.parametrize("number", SIGNALS)
def test_however_many_idle_processes_are_lost_the_next_job_is_done(
    sandbox: Sandbox, tmp_path: Path, number: int
) -> None:
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(sandbox.ask, b"once " + bytes(tmp_path / str(one))) for one in range(3)]
        forks = [has_begun(tmp_path / str(one))[1] for one in range(3)]
        assert len(sandbox.pids) == 3
        for fork in forks:
            os.kill(fork, signal.SIGKILL)
        assert [one.result(60).outcome for one in asked] == [Outcome.DONE] * 3
    before = sandbox.pids
    for pid in before:
        os.kill(pid, number)
        eventually(lambda pid=pid: state_of(pid) in ("Z", "T"))
    assert sandbox.ask(b"echo on").data == b"on"
    assert len(sandbox.pids) == 1
    assert not any(map(is_alive, before))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("who", ["process", "fork"])
def test_a_job_whose_process_or_fork_is_killed_or_stopped_is_tried_again(
    sandbox: Sandbox, tmp_path: Path, number: int, who: str
) -> None:
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(sandbox.ask, b"once " + bytes(tmp_path / "begun"))
        process, fork = has_begun(tmp_path / "begun")
        os.kill(process if who == "process" else fork, number)
        assert asked.result(60) == (Outcome.DONE, b"done")
    assert process not in sandbox.pids
    eventually(lambda: not is_alive(process) and not is_alive(fork))


def test_a_job_that_loses_two_processes_is_unavailable_and_the_next_is_not(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "begun"
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(sandbox.ask, b"pause " + bytes(path))
        for number in SIGNALS:
            process, _ = has_begun(path)
            path.unlink()
            os.kill(process, number)
        with pytest.raises(Unavailable, match="try again") as error:
            asked.result(60)
    assert (error.value.status, error.value.retry_after) == (503, 1)
    assert sandbox.ask(b"echo on").data == b"on"


def test_nobody_waits_for_the_job_of_another(sandbox: Sandbox, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(sandbox.ask, b"once " + bytes(tmp_path / "begun"))
        _, fork = has_begun(tmp_path / "begun")
        for number in range(5):
            assert sandbox.ask(b"echo %d" % number).data == b"%d" % number
        assert not asked.done()
        os.kill(fork, signal.SIGKILL)
        asked.result(60)
    assert len(sandbox.pids) <= 2


def test_a_process_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_START_SECONDS", 0.5)
    stuck = Sandbox(MODULE, ["stuck"], Limits(0.0, 1 << 20))
    with pytest.raises(Unavailable):
        stuck.ask(b"echo")
    assert stuck.pids == []
    stuck.close()


def test_one_that_cannot_start_is_unavailable() -> None:
    missing = Sandbox("tests.ipc.no_such_module", [], LIMITS)
    with pytest.raises(Unavailable):
        missing.ask(b"echo")
    missing.close()


def test_closing_ends_what_runs(sandbox: Sandbox, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(sandbox.ask, b"pause " + bytes(tmp_path / "begun"))
        process, fork = has_begun(tmp_path / "begun")
        sandbox.close()
        with pytest.raises(Unavailable):
            asked.result(60)
    eventually(lambda: not is_alive(process) and not is_alive(fork))
    with pytest.raises(Unavailable):
        sandbox.ask(b"echo")


def test_processes_inherit_no_files(sandbox: Sandbox) -> None:
    with socket.socket() as listener, open(os.devnull) as file:
        listener.bind(("127.0.0.1", 0))
        ends = os.pipe()
        for descriptor in (listener.fileno(), file.fileno(), *ends):
            os.set_inheritable(descriptor, True)
        mine = {os.readlink(f"/proc/self/fd/{one}") for one in (listener.fileno(), *ends)}
        files = set(sandbox.ask(b"files").data.decode().splitlines())
        for end in ends:
            os.close(end)
    assert not files & mine
    # Its report, and nothing of its process's: neither what is asked nor what is answered.
    assert len([one for one in files if one != os.devnull]) == 1, files


@pytest.mark.parametrize("job", ["echo", "pause"])
def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path, job: str) -> None:
    arguments = [sys.executable, "-m", MODULE, "ask", f"{job} {tmp_path / 'begun'}"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        if job == "pause":
            pids = list(has_begun(tmp_path / "begun"))
        assert all(map(is_alive, pids))
        parent.kill()
    eventually(lambda: not any(map(is_alive, pids)))


def test_signals_at_random_moments_fail_no_job(sandbox: Sandbox, rng: np.random.Generator) -> None:
    ended = threading.Event()
    seeds = rng.integers(0, 2**32, 3).tolist()
    asked: list[int] = []

    def attack() -> None:
        chance = random.Random(seeds[0])
        while not ended.wait(chance.uniform(0.0, 0.4)):
            for pid in chance.sample(sandbox.pids, min(1, len(sandbox.pids))):
                victim = chance.choice([pid, *children_of(pid)])
                try:
                    os.kill(victim, chance.choice(SIGNALS))
                except ProcessLookupError:
                    continue

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(25):
            kind = chance.choice([b"echo", b"refuse"])
            expected = (Outcome.DONE if kind == b"echo" else Outcome.REFUSED, b"%d" % number)
            try:
                assert sandbox.ask(b"%s %d" % (kind, number)) == expected
            except Unavailable:
                asked.append(0)
            else:
                asked.append(1)

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        with ThreadPoolExecutor() as threads:
            for future in [threads.submit(work, seed) for seed in seeds[1:]]:
                future.result(250)
    finally:
        ended.set()
        attacker.join()
    assert sandbox.ask(b"echo calm").data == b"calm"
    print(f"{sum(asked)} of {len(asked)} jobs were done")
    assert len(asked) == 50
