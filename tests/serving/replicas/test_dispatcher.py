"""Requests of a text worker reach an engine, whichever of them die: each is somewhere, or waits, and ends once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.tiers import scaled
from tokenmill.core.messages import AbortRequests, AddRequest, PromptProgress, StepOutputs, TokenOutput
from tokenmill.core.part_messages import EngineBack, EngineDraining, EngineLost, LeaveWorker
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.replicas.dispatcher import HARMLESS_OUTPUTS, Dispatcher, Journal
from tokenmill.serving.replicas.routing.policies import FewestInFlight
from tokenmill.serving.replicas.routing.router import Router

ENGINES = 3


class Box:
    """The way to one life of an engine, and what that engine has of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self.requests: dict[str, AddRequest] = {}
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        assert not self.is_closed
        self.sent.append(message)
        if isinstance(message, AddRequest):
            assert message.id not in self.requests, "nothing is sent twice to one life"
            # An engine decodes what it gets: it has its own copy.
            self.requests[message.id] = msgspec.structs.replace(message, output_token_ids=[*message.output_token_ids])
        if isinstance(message, AbortRequests):
            for one in message.ids:
                self.requests.pop(one, None)

    def close(self, linger: int | None = None) -> None:
        self.is_closed = True


def request(name: str, **fields: Any) -> AddRequest:
    return AddRequest(id=name, prompt_token_ids=[1, 2], params=SamplingParams(**fields))


def dispatcher(engines: int = 1, predecessor: str = "", mark: str = "") -> tuple[Dispatcher, dict[str, Box]]:
    boxes: dict[str, Box] = {}

    def connect(inbox: str) -> Any:
        return boxes.setdefault(inbox, Box(inbox))

    names = {index: f"engine-{index}" for index in range(engines)}
    return Dispatcher(names, connect, Router(list(names), FewestInFlight()), predecessor, mark), boxes


def outputs(source: str, *ones: TokenOutput) -> StepOutputs:
    return StepOutputs(0, list(ones), source=source)


def test_what_an_engine_has_brought_goes_to_the_next_life() -> None:
    ours, boxes = dispatcher()
    ours.add(request("a"))
    assert ours.apply_outputs(outputs("engine-0", TokenOutput("a", [5, 6])))
    assert ours.apply_news(EngineLost(0)) == []
    ours.add(request("b"))  # it waits
    assert [one.id for one in ours.apply_news(EngineBack(0, "engine-0-life-1"))] == ["a", "b"]
    again = boxes["engine-0-life-1"].requests
    assert again["a"].output_token_ids == [5, 6] and again["b"].output_token_ids == []


def test_a_suspect_that_has_ended_is_cleared_by_whoever_had_it() -> None:
    ours, _ = dispatcher(mark="1-")
    ours.add(request("1-a"))
    ours.add(request("1-b"))
    ours.apply_outputs(outputs("engine-0", TokenOutput("1-b", [5], FinishReason.LENGTH)))
    ours.apply_news(EngineLost(0, ["1-a", "1-b", "2-c"]))
    assert ours.cleared() == ["1-b"], "not those of another text worker, nor one that is open"


def test_what_a_dead_engine_had_on_its_way_is_dropped() -> None:
    ours, _ = dispatcher()
    ours.add(request("a"))
    ours.apply_news(EngineLost(0))
    assert not ours.apply_outputs(outputs("engine-0", TokenOutput("a", [5])))
    ours.apply_news(EngineBack(0, "engine-0-life-1"))
    assert not ours.apply_outputs(outputs("engine-0", TokenOutput("a", [5])))
    assert ours.apply_outputs(outputs("engine-0-life-1", TokenOutput("a", [5])))


def test_prompt_log_probabilities_that_are_out_are_not_asked_for_again() -> None:
    journal = Journal()
    asked = request("a", prompt_logprobs=1)
    journal.accept(asked)
    journal.record_outputs([TokenOutput("a", [])])
    assert [one.params.prompt_logprobs for one in journal] == [1]
    journal.record_outputs([TokenOutput("a", [4])])
    assert [one.params.prompt_logprobs for one in journal] == [None]


def test_a_worker_tells_engines_first_to_forget_its_predecessor() -> None:
    ours, boxes = dispatcher(predecessor="worker-0")
    ours.add(request("a"))
    kinds = [type(message) for message in boxes["engine-0"].sent]
    assert kinds == [LeaveWorker, AddRequest]


def test_suspects_run_one_after_the_other_and_others_do_not_wait() -> None:
    ours, boxes = dispatcher()
    for name in "abc":
        ours.add(request(name))
    ours.apply_news(EngineLost(0, suspects=["a", "b"]))
    ours.apply_news(EngineBack(0, "next"))
    assert set(boxes["next"].requests) == {"a", "c"}
    for _ in range(HARMLESS_OUTPUTS):
        assert "b" not in boxes["next"].requests
        ours.apply_outputs(outputs("next", TokenOutput("a", [1])))
    assert set(boxes["next"].requests) == {"a", "b", "c"}
    assert ours.cleared() == ["a"]
    ours.abort(["b"])
    assert ours.cleared() == ["b"] and ours.cleared() == []


def test_the_progress_of_a_prompt_does_not_prove_a_suspect_harmless() -> None:
    ours, _ = dispatcher()
    ours.add(request("a"))
    ours.apply_news(EngineLost(0, suspects=["a"]))
    ours.apply_news(EngineBack(0, "next"))
    for _ in range(HARMLESS_OUTPUTS + 1):
        ours.apply_outputs(outputs("next", TokenOutput("a", [], progress=PromptProgress(2, 0, 1))))
    assert ours.cleared() == []
    for _ in range(HARMLESS_OUTPUTS):
        ours.apply_outputs(outputs("next", TokenOutput("a", [1])))
    assert ours.cleared() == ["a"]


@pytest.mark.parametrize("engines", [1, 2])
def test_an_aborted_request_is_not_sent_again(engines: int) -> None:
    ours, boxes = dispatcher(engines)
    ours.add(request("a"))
    ours.abort(["a"])
    ours.apply_news(EngineLost(0))
    assert ours.apply_news(EngineBack(0, "next")) == []
    assert not boxes["next"].requests


def test_a_draining_engine_gets_nothing_new_and_says_once_that_it_is_idle() -> None:
    ours, boxes = dispatcher(2)
    ours.add(request("a"))
    (home,) = [number for number in (0, 1) if boxes[f"engine-{number}"].requests]
    assert ours.idle() == []
    ours.apply_news(EngineDraining(home))
    for number in range(4):
        ours.add(request(f"b{number}"))
    assert set(boxes[f"engine-{home}"].requests) == {"a"}
    assert ours.idle() == []
    ours.apply_outputs(outputs(f"engine-{home}", TokenOutput("a", [1], FinishReason.STOP)))
    assert ours.idle() == [home] and ours.idle() == []


def test_what_is_bound_to_an_engine_waits_for_it_until_that_is_removed() -> None:
    ours, boxes = dispatcher(2)
    ours.add(request("a"))
    (home,) = [number for number in (0, 1) if boxes[f"engine-{number}"].requests]
    ours.apply_news(EngineDraining(home, is_bound=True))
    assert ours.apply_news(EngineLost(home)) == []
    assert [one.id for one in ours.apply_news(EngineBack(home, "next"))] == ["a"]
    assert [one.id for one in ours.apply_news(EngineLost(home, is_removed=True))] == ["a"]
    assert "a" in boxes[f"engine-{1 - home}"].requests


class Lives(RuleBasedStateMachine):
    """Engines die, come back, drain and go for good; requests come, bring tokens, end, and are aborted."""

    open_requests = Bundle("open_requests")

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.boxes = dispatcher(ENGINES)
        self.living = {index: f"engine-{index}" for index in range(ENGINES)}
        self.told: dict[str, list[int]] = {}
        self.num_lives = self.num_requests = 0
        self.suspects: set[str] = set()
        self.draining: set[int] = set()
        self.home: dict[str, int] = {}  # of bound requests

    def engine_with(self, name: str) -> str | None:
        has = [inbox for inbox in self.living.values() if name in self.boxes[inbox].requests]
        assert len(has) <= 1, "two engines have it"
        return has[0] if has else None

    @rule(target=open_requests)
    def accept(self) -> str:
        self.num_requests += 1
        name = str(self.num_requests)
        self.told[name] = []
        self.ours.add(request(name))
        return name

    @rule(name=open_requests, count=st.integers(1, 3))
    def bring(self, name: str, count: int) -> None:
        if name in self.told and (inbox := self.engine_with(name)) is not None:
            had = self.boxes[inbox].requests[name].output_token_ids
            assert had == self.told[name], "it goes on behind what is known"
            fresh = [*range(len(had), len(had) + count)]
            had += fresh
            assert self.ours.apply_outputs(outputs(inbox, TokenOutput(name, fresh)))
            self.told[name] += fresh

    @rule(name=consumes(open_requests))
    def finish(self, name: str) -> None:
        if name in self.told and (inbox := self.engine_with(name)) is not None:
            del self.boxes[inbox].requests[name]
            self.ours.apply_outputs(outputs(inbox, TokenOutput(name, [0], FinishReason.STOP)))
            del self.told[name]

    @rule(name=consumes(open_requests))
    def abort(self, name: str) -> None:
        if self.told.pop(name, None) is not None:
            self.ours.abort([name])

    @rule(engine=st.integers(0, ENGINES - 1), is_suspicious=st.booleans())
    def die(self, engine: int, is_suspicious: bool) -> None:
        if (inbox := self.living.pop(engine, None)) is not None:
            ran = list(self.boxes[inbox].requests) if is_suspicious else []
            self.suspects |= set(ran)
            self.ours.apply_news(EngineLost(engine, suspects=ran))

    @rule(engine=st.integers(0, ENGINES - 1), is_bound=st.booleans())
    def drain(self, engine: int, is_bound: bool) -> None:
        if engine in self.living and engine not in self.draining:
            self.draining.add(engine)
            if is_bound:
                self.home |= {name: engine for name in self.told if name in self.boxes[self.living[engine]].requests}
            self.ours.apply_news(EngineDraining(engine, is_bound))

    @rule(engine=st.integers(0, ENGINES - 1))
    def remove(self, engine: int) -> None:
        if engine in self.draining:
            self.living.pop(engine, None)
            self.draining.discard(engine)
            self.home = {name: its for name, its in self.home.items() if its != engine}
            self.ours.apply_news(EngineLost(engine, is_removed=True))

    @rule(engine=st.integers(0, ENGINES - 1))
    def come_back(self, engine: int) -> None:
        if engine not in self.living:
            self.num_lives += 1
            self.living[engine] = f"life-{self.num_lives}"
            self.ours.apply_news(EngineBack(engine, self.living[engine]))

    @invariant()
    def each_is_with_an_engine_or_waits_for_a_reason(self) -> None:
        self.suspects -= set(self.ours.cleared())
        homes = {name: self.engine_with(name) for name in self.told}
        on_trial = [name for name in self.suspects if homes.get(name) is not None]
        assert len(on_trial) <= 1
        for name, home in homes.items():
            takers = self.living.keys() & {self.home[name]} if name in self.home else self.living.keys() - self.draining
            if home is None:
                assert not takers or (name in self.suspects and on_trial)
            elif name in self.home:
                assert home == self.living[self.home[name]]
        for inbox in self.living.values():
            assert set(self.boxes[inbox].requests) <= set(self.told), "an engine has what nobody waits for"
        for engine in self.ours.idle():
            bound = {self.home[name] for name in self.told if name in self.home}
            assert engine in self.draining and engine not in bound
            assert engine not in self.living or not self.boxes[self.living[engine]].requests


Lives.TestCase.settings = settings(max_examples=scaled(60), stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
