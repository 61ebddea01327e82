"""The loop of the engine process: what it does while nobody waits, and that requests go first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import zmq

from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.startup.assembly.engine_process import IDLE_POLL_MS, NUM_IDLE_POLLS, REST_POLL_MS, EngineLoop


class Engine:
    """Each request is three steps of work."""

    is_idle = False

    def __init__(self, diary: list[str]) -> None:
        self.diary = diary
        self.left = 0

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def add(self, message: AddRequest) -> list[object]:
        self.diary.append(f"add {message.id}")
        self.left += 3
        return []

    def step(self) -> list[object]:
        self.diary.append("step")
        self.left -= 1
        return []

    def take_kv_events(self) -> list[object]:
        return []

    def stats(self) -> str:
        return "stats"


class Sockets:
    """Requests by the turn of the loop in which they come; stops it when there is nothing left to do but wait."""

    def __init__(self, diary: list[str], arrivals: dict[int, str]) -> None:
        self.diary = diary
        self.arrivals = arrivals
        self.turn = 0

    def receive(self, wait_ms: int) -> list[AddRequest]:
        self.turn += 1
        if wait_ms:
            assert wait_ms == IDLE_POLL_MS
            self.diary.append("wait")
            self.loop.stop()
        name = self.arrivals.get(self.turn)
        return [AddRequest(id=name, prompt_token_ids=[0], params=SamplingParams())] if name else []

    def send_to_api(self, message: object) -> None:
        pass


def diary_of(turns: int, arrivals: dict[int, str]) -> list[str]:
    """Return the actions of a loop with this much idle work, until it waits."""
    diary: list[str] = []

    def idle_work() -> Iterator[None]:
        for number in range(turns):
            diary.append(f"idle {number}")
            yield

    sockets = Sockets(diary, arrivals)
    heartbeat = Heartbeat(zmq.Context.instance(), Path(), None, timeout=30)
    sockets.loop = EngineLoop(Engine(diary), sockets, None, idle_work(), heartbeat)
    sockets.loop.run()
    return diary


def test_idle_work_goes_on_until_it_is_done_and_only_then_the_loop_waits():
    assert diary_of(2, {}) == ["idle 0", "idle 1", "wait"]
    assert diary_of(0, {}) == ["wait"]


class QuietSockets(Sockets):
    """Notes how long the loop is ready to wait, for some turns."""

    def receive(self, wait_ms: int) -> list[AddRequest]:
        self.turn += 1
        self.diary.append(str(wait_ms))
        if self.turn == NUM_IDLE_POLLS + 3:
            self.loop.stop()
        return []


def test_a_loop_that_has_looked_in_vain_for_long_lets_the_machine_sleep():
    diary: list[str] = []
    sockets = QuietSockets(diary, {})
    heartbeat = Heartbeat(zmq.Context.instance(), Path(), None, timeout=30)
    sockets.loop = EngineLoop(Engine(diary), sockets, None, iter(()), heartbeat)
    sockets.loop.run()
    waits = [entry for entry in diary if entry != "0"]
    assert waits[:NUM_IDLE_POLLS] == [str(IDLE_POLL_MS)] * NUM_IDLE_POLLS
    assert set(waits[NUM_IDLE_POLLS:]) == {str(REST_POLL_MS)}


def test_requests_interrupt_idle_work_and_it_goes_on_after_them():
    steps = ["step"] * 3
    assert diary_of(3, {2: "a"}) == ["idle 0", "add a", *steps, "idle 1", "idle 2", "wait"]
    assert diary_of(1, {1: "a", 3: "b"}) == ["add a", *steps[:2], "add b", *steps, "step", "idle 0", "wait"]
