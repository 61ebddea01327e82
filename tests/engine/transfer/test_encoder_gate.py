"""The gate of requests that wait for encoder outputs: who waits, for how long, and what the scheduler is told."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.core.media import MediaInput, MediaSpan
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.transfers import Encoded
from tokenmill.engine.transfer.encoder_gate import EncoderGate

SECONDS = 30.0


class World:
    """A store, encoder servers that answer when told to, and a clock."""

    def __init__(self, has_servers: bool = True) -> None:
        self.there: set[str] = set()
        self.kept: set[str] = set()
        self.failed: list[str] = []
        self.asked: dict[str, Callable[[bool], None]] = {}
        self.num_asks = 0
        self.now = 0.0
        self.is_closed = 0
        servers = self if has_servers else None
        self.gate = EncoderGate(self, servers, self.kept.__contains__, SECONDS, lambda: self.now)

    def has(self, digest: str) -> bool:
        return digest in self.there

    def take_failed(self) -> list[str]:
        failed, self.failed = self.failed, []
        return failed

    def ask(self, one: MediaInput, answer: Callable[[bool], None]) -> None:
        self.num_asks += 1
        self.asked[one.span.digest] = answer

    def close(self) -> None:
        self.is_closed += 1


def request(name: str, *digests: str) -> AddRequest:
    media = [MediaInput(MediaSpan(2 * place, 1, digest, 2, 2, 7), b"") for place, digest in enumerate(digests)]
    return AddRequest(id=name, prompt_token_ids=[7] * 20, params=SamplingParams(), media=media)


def test_without_servers_nobody_waits() -> None:
    world = World(has_servers=False)
    world.there = {"a"}
    assert world.gate.admit(request("0", "a", "b"))
    assert world.gate.take_events() == [Encoded("a")]
    assert world.gate.collect(0.0) == {}


def test_a_request_goes_on_when_all_its_contents_are_answered() -> None:
    world = World()
    assert not world.gate.admit(request("0", "a", "b", "a"))
    world.asked["a"](True)
    assert world.gate.collect(0.0) == {}
    world.asked["b"](False)
    assert world.gate.collect(0.0) == {"0": None}
    assert world.gate.take_events() == [Encoded("a")]


def test_a_content_is_asked_for_once_and_one_that_is_kept_is_not() -> None:
    world = World()
    world.kept.add("k")
    assert world.gate.admit(request("0", "k"))
    assert not world.gate.admit(request("1", "a"))
    assert not world.gate.admit(request("2", "a"))
    assert world.num_asks == 1
    world.asked["a"](True)
    assert world.gate.collect(0.0) == {"1": None, "2": None}
    assert world.gate.take_events() == [Encoded("a")]


def test_the_scheduler_counts_on_an_output_while_a_request_shows_it() -> None:
    world = World()
    world.there = {"a"}
    for name in "01":
        assert world.gate.admit(request(name, "a"))
    world.gate.release("0")
    assert world.gate.take_events() == [Encoded("a")]
    world.gate.release("1")
    assert world.gate.take_events() == [Encoded("a", is_there=False)]


def test_an_answer_that_does_not_come_is_waited_for_so_long_and_may_come_late() -> None:
    world = World()
    assert not world.gate.admit(request("0", "a"))
    world.now = SECONDS
    assert world.gate.collect(0.0) == {}
    world.now = SECONDS + 1
    assert world.gate.collect(0.0) == {"0": None}
    assert world.gate.take_events() == []
    world.asked["a"](True)  # its request may still wait for a row
    assert world.gate.collect(0.0) == {}
    assert world.gate.take_events() == [Encoded("a")]


def test_an_answer_for_a_request_that_has_gone_is_told_to_nobody() -> None:
    world = World()
    assert not world.gate.admit(request("0", "a"))
    world.gate.release("0")
    world.asked["a"](True)
    assert world.gate.collect(0.0) == {}
    assert world.gate.take_events() == []


def test_a_load_that_failed_is_told_and_the_content_may_be_found_again() -> None:
    world = World()
    world.there = {"a"}
    assert world.gate.admit(request("0", "a"))
    assert world.gate.take_events() == [Encoded("a")]
    world.failed = ["a"]
    assert world.gate.take_events() == [Encoded("a", is_there=False, has_failed=True)]
    assert world.gate.admit(request("1", "a"))
    assert world.gate.take_events() == [Encoded("a")]


def test_closing_closes_servers_and_store() -> None:
    world = World()
    world.gate.close()
    assert world.is_closed == 2
