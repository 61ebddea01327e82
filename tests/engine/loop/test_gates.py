"""Let requests wait at made-up gates, which open when a test or chance says so."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.scheduler.harness import Harness, plans
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import FinishReason, RequestStatus
from tokenmill.lab.simulate.replay import replay

SEED = seed_for(__name__)
GRAMMAR, REMOTE_KV = RequestStatus.WAITING_FOR_GRAMMAR, RequestStatus.WAITING_FOR_REMOTE_KV


class MadeUpGate:
    """Keeps requests until `open` or `refuse`; those of `free` pass, those of `banned` are refused at once."""

    def __init__(self, status: RequestStatus, free: tuple[str, ...] = (), banned: tuple[str, ...] = ()) -> None:
        self.status = status
        self.free = free
        self.banned = banned
        self.waiting: list[str] = []
        self.news: dict[str, InvalidRequest | None] = {}
        self.admitted: list[str] = []
        self.released: Counter[str] = Counter()
        self.timeouts: list[float] = []
        self.is_closed = False

    def admit(self, message: AddRequest) -> bool:
        if message.id in self.banned:
            raise InvalidRequest("this can never be")
        self.admitted.append(message.id)
        if message.id not in self.free:
            self.waiting.append(message.id)
        return message.id in self.free

    def open(self, *ids: str) -> None:
        for request_id in ids:
            self.waiting.remove(request_id)
            self.news[request_id] = None

    def refuse(self, request_id: str) -> None:
        self.waiting.remove(request_id)
        self.news[request_id] = InvalidRequest("it did not come")

    def collect(self, timeout: float) -> dict[str, InvalidRequest | None]:
        self.timeouts.append(timeout)
        news, self.news = self.news, {}
        return news

    def release(self, request_id: str) -> None:
        assert request_id in self.admitted
        self.released[request_id] += 1
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        self.news.pop(request_id, None)

    def close(self) -> None:
        self.is_closed = True


def check_releases(harness: Harness, *gates: MadeUpGate) -> None:
    """All has ended: each gate has let go of each request that it took in, once."""
    assert not harness.scheduler.requests
    for gate in gates:
        assert gate.released == Counter(gate.admitted)
        assert not gate.waiting


def status_of(harness: Harness, request_id: str) -> RequestStatus:
    return harness.scheduler.requests[request_id].status


def test_requests_go_on_in_the_order_in_which_they_become_ready_and_keep_their_places() -> None:
    gate = MadeUpGate(REMOTE_KV, free=("2",))
    harness = Harness(max_num_seqs=1, gates=(gate,))
    ids = [harness.add([number, 1, 2], max_tokens=2) for number in range(5)]
    harness.step()
    assert harness.scheduler.explain("0") == "is waiting for remote kv"
    gate.open("3")
    harness.step()
    gate.open("1", "4", "0")
    harness.drain()
    order = list(dict.fromkeys(request_id for step in plans(harness) for request_id in step))
    assert order == ["2", "0", "1", "3", "4"], "one row: who is ready when it is free, by order of arrival"
    assert all(harness.records[request_id].finish_reason is FinishReason.LENGTH for request_id in ids)
    check_releases(harness, gate)


def test_a_request_waits_at_several_gates_at_once_and_shows_the_first() -> None:
    first, second = MadeUpGate(GRAMMAR), MadeUpGate(REMOTE_KV)
    harness = Harness(gates=(first, second))
    a, b = (harness.add([1, 2, number], max_tokens=1) for number in range(2))
    assert first.waiting == second.waiting == [a, b], "neither waits for the other"
    second.open(a)
    first.open(b)
    harness.step()
    assert (status_of(harness, a), status_of(harness, b)) == (GRAMMAR, REMOTE_KV)
    assert harness.engine.stats().waiting_by_reason["remote_kv"] == 1
    first.open(a)
    second.open(b)
    harness.drain()
    check_releases(harness, first, second)


def test_a_request_that_one_gate_refuses_is_let_go_by_those_before_it() -> None:
    first, second, third = MadeUpGate(GRAMMAR), MadeUpGate(REMOTE_KV, banned=("0",)), MadeUpGate(GRAMMAR)
    harness = Harness(gates=(first, second, third))
    harness.add([1, 2])
    assert harness.records["0"].finish_reason is FinishReason.ERROR
    assert first.released == {"0": 1}
    assert not second.released
    assert not third.admitted
    assert not harness.engine.has_work


def test_a_refusal_ends_a_request_that_waits_and_no_other() -> None:
    first, second = MadeUpGate(GRAMMAR), MadeUpGate(REMOTE_KV)
    harness = Harness(gates=(first, second))
    refused, other = harness.add([1, 2]), harness.add([3, 4])
    first.refuse(refused)
    second.open(refused, other)
    first.open(other)
    outputs = harness.engine.step()
    (last,) = [output for output in outputs if output.id == refused]
    assert (last.finish_reason, last.error, last.error_status) == (FinishReason.ERROR, "it did not come", 400)
    harness.collect(outputs)
    harness.drain()
    assert harness.records[other].finish_reason is FinishReason.LENGTH
    check_releases(harness, first, second)


def test_a_request_that_is_aborted_while_it_waits_is_let_go_at_once() -> None:
    gate = MadeUpGate(GRAMMAR)
    harness = Harness(gates=(gate,))
    request_id = harness.add([1, 2])
    gate.open(request_id)  # and the engine does not know yet
    harness.abort(request_id, request_id, "no such id")
    assert gate.released == {request_id: 1}
    assert not harness.engine.has_work
    harness.abort(request_id)
    harness.step()
    check_releases(harness, gate)


def test_what_never_fits_is_let_go() -> None:
    gate = MadeUpGate(GRAMMAR)
    harness = Harness(num_pages=2, gates=(gate,))
    harness.add(list(range(20)), max_tokens=5)
    assert harness.records["0"].finish_reason is FinishReason.ERROR
    check_releases(harness, gate)


def test_what_a_launched_step_uses_is_held_until_its_commit() -> None:
    gate = MadeUpGate(GRAMMAR, free=("0",))
    harness = Harness(depth=2, gates=(gate,))
    request_id = harness.add([1, 2, 3], max_tokens=9)
    harness.step()
    harness.abort(request_id)
    assert not gate.released
    harness.step()
    assert gate.released == {request_id: 1}


def test_a_session_is_held_until_it_ends_and_not_only_until_its_turn_does() -> None:
    gate = MadeUpGate(GRAMMAR, free=("0",))
    harness = Harness(gates=(gate,))
    session = harness.open_session([1, 2], max_tokens=1)
    for _ in range(3):
        while harness.engine.has_work:
            harness.step()
        assert not gate.released
        harness.extend(session, [3], max_tokens=1)
    harness.drain()
    check_releases(harness, gate)


def test_an_idle_engine_waits_a_little_at_the_gate_of_the_first_that_waits() -> None:
    first, second = MadeUpGate(GRAMMAR, free=("0",)), MadeUpGate(REMOTE_KV)
    harness = Harness(gates=(first, second))
    harness.add([1, 2])
    harness.add([3, 4])
    harness.abort("1")
    harness.step()
    assert not harness.engine.is_idle, "the loop must not sleep: there will be news"
    assert (first.timeouts, second.timeouts) == ([0.0, 0.0], [0.0, pytest.approx(0.005)])
    harness.abort("0")
    harness.step()
    assert harness.engine.is_idle
    assert len(first.timeouts) == 2, "nobody waits"


def test_gates_are_closed_with_the_engine() -> None:
    gates = MadeUpGate(GRAMMAR), MadeUpGate(REMOTE_KV)
    harness = Harness(gates=gates)
    harness.engine.close()
    assert all(gate.is_closed for gate in gates)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_whatever_comes_each_gate_lets_go_of_each_request_once(tmp_path: Path, depth: int) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + depth)
    numbers = [str(number) for number in range(120)]
    gates = tuple(
        MadeUpGate(status, tuple(rng.sample(numbers, 40)), tuple(rng.sample(numbers, 10)))
        for status in (GRAMMAR, REMOTE_KV, GRAMMAR)
    )
    harness = Harness(depth=depth, num_pages=9, gates=gates, log=tmp_path / "log")
    for number in numbers:
        harness.add([rng.randrange(3) for _ in range(rng.randint(1, 14))], rng.randint(1, 9))
        for gate in gates:
            for request_id in rng.sample(gate.waiting, min(len(gate.waiting), rng.randint(0, 2))):
                gate.refuse(request_id) if rng.random() < 0.2 else gate.open(request_id)
        if rng.random() < 0.2:
            harness.abort(rng.choice(list(harness.scheduler.requests) or [number]))
        if rng.random() < 0.05:
            harness.runner.failing_steps.add(harness.scheduler.step + 2)
        for _ in range(rng.randint(0, 3)):
            harness.step()
    for gate in gates:
        gate.open(*gate.waiting)
    harness.drain()
    harness.engine.close()
    check_releases(harness, *gates)
    reasons = {record.finish_reason for record in harness.records.values()}
    assert reasons >= {FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ABORT}
    assert replay(tmp_path / "log").difference is None
