"""Long prompts are prepared aside, and those that nobody waits for any more are not begun."""

import select
import threading

import pytest

from tokenmill.core.messages import GenerateText
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.text_queries import Encoded, EncodeText
from tokenmill.serving.frontend.prepare_thread import PrepareThread


class Gate:
    """A preparation that waits until it is let go."""

    def __init__(self):
        self.begun = []
        self.news = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, message):
        self.begun.append(message)
        self.news.release()
        assert self.go.acquire(timeout=10)
        return Encoded("", [], [])


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def thread(gate):
    thread = PrepareThread(gate)
    yield thread
    gate.go.release(100)
    thread.close()


def collect(thread, count):
    """The next `count` of what is finished, as a worker would wait for them."""
    found = []
    while len(found) < count:
        assert select.select([thread.fd], [], [], 10)[0], "the bell rings when something is finished"
        thread.acknowledge()
        found += thread.finished()
    return found


def prompt(*ids):
    return GenerateText(ids=list(ids), params=SamplingParams(), text="x")


def test_the_first_to_come_is_the_first_to_be_finished(thread, gate):
    messages = [EncodeText(id=str(number), text="x") for number in range(5)]
    for message in messages:
        thread.put(message)
    assert thread.finished() == []
    gate.go.release(5)
    assert [message for message, _, _ in collect(thread, 5)] == messages
    assert not select.select([thread.fd], [], [], 0.05)[0]


def test_what_was_aborted_before_its_turn_is_not_begun(thread, gate):
    first, second, third = prompt("a"), prompt("b", "c"), prompt("d")
    for message in (first, second, third):
        thread.put(message)
    assert gate.news.acquire(timeout=10), "the first one runs"
    thread.abort(["b", "c", "unknown"])
    gate.go.release(2)
    assert [(message, aborted) for message, _, aborted in collect(thread, 2)] == [(first, []), (third, [])]
    assert gate.begun == [first, third]


def test_what_is_aborted_while_it_runs_is_dropped_and_a_part_of_it_is_told(thread, gate):
    whole, part = prompt("a", "b"), prompt("c", "d")
    thread.put(whole)
    assert gate.news.acquire(timeout=10)
    thread.put(part)
    thread.abort(["a", "b", "d"])
    gate.go.release(2)
    assert [(message, aborted) for message, _, aborted in collect(thread, 1)] == [(part, ["d"])]
    thread.put(prompt("a"))
    gate.go.release()
    assert [aborted for _, _, aborted in collect(thread, 1)] == [[]], "an abort is for what was inside, not for later"
