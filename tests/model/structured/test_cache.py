"""Compiling under limits, and a cache that is bounded in bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.eventually import eventually
from tokenmill.core.errors import InvalidRequest, Refusal, Unavailable
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.ipc.sandbox import Limits
from tokenmill.model.structured.cache import MOST_FAULTS, NO_CONSTRAINT, GrammarCache
from tokenmill.model.structured.compiler import GrammarTokenizer
from tokenmill.model.structured.trial import GrammarTrial

MIB = 1 << 20
# Each takes seconds or hundreds of MiB without limits.
BOMBS = {
    "a remainder": {"json_schema": {"type": "integer", "multipleOf": 999_983}},
    "repeated repetitions": {"lark_grammar": "start: /((a{100}){100}){100}/"},
    "many choices": {"lark_grammar": "start: " + " | ".join(f'"{number}"' for number in range(100_000))},
    "products": {
        "json_schema": {
            "allOf": [
                {"oneOf": [{"properties": {f"{i}{j}": {"type": "string"}}} for j in range(10)]} for i in range(10)
            ]
        }
    },
    "deep nesting": {"json_schema": json.loads('{"items":' * 300 + "{}" + "}" * 300)},
}


def grammar(*parts: dict[str, object]) -> str:
    return json.dumps({"grammars": parts})


def choice(number: int) -> str:
    return grammar({"lark_grammar": f'start: "{number}"'})


@pytest.fixture
def tokenizer(model: Path) -> GrammarTokenizer:
    return GrammarTokenizer(str(model / "tokenizer.json"), 331, (330,))


@pytest.fixture
def trial(tokenizer: GrammarTokenizer) -> Iterator[GrammarTrial]:
    with contextlib.closing(GrammarTrial(tokenizer, Limits(0.5, 64 * MIB))) as trial:
        yield trial


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_goes_off_where_it_does_no_harm(trial: GrammarTrial, name: str) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        trial.check(grammar(BOMBS[name]))
    assert trial.check(choice(1)) < MIB


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_grammar_is_blamed_for_a_process_that_is_gone(trial: GrammarTrial, number: int) -> None:
    trial.check(choice(1))
    for pid in trial.sandbox.pids:
        os.kill(pid, number)
    assert trial.check(choice(2)) < MIB
    with pytest.raises(InvalidRequest, match="nothing"):
        trial.check(grammar({"lark_grammar": "start: nothing"}))


def admit(grammars: GrammarCache, request_id: str, text: str) -> bool:
    params = SamplingParams(grammar=Grammar(text, "structured_outputs"))
    return grammars.admit(AddRequest(id=request_id, prompt_token_ids=[1], params=params))


def settle(grammars: GrammarCache) -> dict[str, Refusal | None]:
    """Wait until nobody waits; who has become ready (None), and who is refused."""
    news: dict[str, Refusal | None] = {}
    while grammars._waiting:
        news.update(grammars.collect(10))
    return news


def open_cache(tokenizer: GrammarTokenizer, max_bytes: int = 256 * MIB) -> GrammarCache:
    return GrammarCache(tokenizer, Limits(2.0, 256 * MIB), max_bytes)


@pytest.fixture
def max_bytes(tokenizer: GrammarTokenizer) -> int:
    """Room for about ten small grammars."""
    with contextlib.closing(open_cache(tokenizer)) as grammars:
        admit(grammars, "one", choice(1))
        settle(grammars)
        return 10 * grammars.num_bytes


@pytest.fixture
def grammars(tokenizer: GrammarTokenizer, max_bytes: int) -> Iterator[GrammarCache]:
    with contextlib.closing(open_cache(tokenizer, max_bytes)) as grammars:
        yield grammars


def test_requests_of_one_grammar_wait_for_one_compilation(grammars: GrammarCache) -> None:
    assert not admit(grammars, "a", choice(1))
    assert not admit(grammars, "b", choice(1))
    assert not admit(grammars, "c", grammar({"lark_grammar": "start: nothing"}))
    news = settle(grammars)
    assert sorted(news) == ["a", "b", "c"]
    assert [request_id for request_id, refusal in news.items() if refusal is not None] == ["c"]
    assert admit(grammars, "d", choice(1))
    with pytest.raises(InvalidRequest, match="nothing"):
        admit(grammars, "e", grammar({"lark_grammar": "start: nothing"}))


def test_a_failure_that_is_not_the_grammars_own_is_not_kept(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, error in enumerate((Unavailable("lost"), OSError("too many open files"), MemoryError())):
        with monkeypatch.context() as patch:
            patch.setattr(grammars._trial, "check", Mock(side_effect=error))
            assert not admit(grammars, f"failed {number}", choice(number))
            (refusal,) = settle(grammars).values()
            assert isinstance(refusal, Unavailable)
            assert refusal.status == 503
        assert not admit(grammars, f"again {number}", choice(number))
        assert settle(grammars) == {f"again {number}": None}
    assert len(grammars._faults) == 0


def test_of_faults_the_last_that_were_asked_for_are_kept(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refuse(text: str) -> int:
        tried.append(text)
        raise InvalidRequest("no grammar")

    monkeypatch.setattr(grammars._trial, "check", refuse)
    count = MOST_FAULTS + random.randint(2, 300)
    for number in range(count):
        admit(grammars, str(number), choice(number))
        settle(grammars)
        with pytest.raises(InvalidRequest, match="no grammar") as error:
            admit(grammars, "the first again", choice(0))
        assert len(error.traceback) < 20, "it is the same error each time, and must not grow"
        assert len(grammars._faults) <= MOST_FAULTS
    assert len(grammars._faults) == MOST_FAULTS
    assert tried == [choice(number) for number in range(count)]
    assert not admit(grammars, "forgotten", choice(1))
    settle(grammars)
    assert tried[-1] == choice(1)
    assert grammars.num_bytes == 0
    assert not grammars._text_of


def test_grammars_that_nobody_uses_make_room_least_recently_used_first(grammars: GrammarCache, max_bytes: int) -> None:
    for number in range(30):
        admit(grammars, str(number), choice(number))
        settle(grammars)
        assert grammars.num_bytes <= max_bytes
        grammars.release(str(number))
        admit(grammars, "first", choice(0))
        settle(grammars)
        grammars.release("first")
    assert grammars.template(choice(0)) is not None
    assert grammars.template(choice(29)) is not None
    assert grammars.template(choice(5)) is None


def test_grammars_in_use_stay_and_bound_what_else_is_taken(grammars: GrammarCache, max_bytes: int) -> None:
    for number in range(20):
        admit(grammars, str(number), choice(number))
        refusal = settle(grammars)[str(number)]
        assert grammars.num_bytes <= max_bytes
        if refusal is not None:
            break
    assert number > 3
    assert "try again later" in str(refusal)
    assert all(grammars.template(choice(used)) is not None for used in range(number))
    # What a grammar takes is measured, and not twice the same: the room of one may not do for another.
    for used in range(3):
        grammars.release(str(used))
    admit(grammars, "again", choice(number))
    assert settle(grammars) == {"again": None}
    assert grammars.num_bytes <= max_bytes


def test_a_request_that_ends_while_its_grammar_is_compiled_is_forgotten(grammars: GrammarCache) -> None:
    admit(grammars, "a", choice(1))
    grammars.release("a")
    assert settle(grammars) == {}
    admit(grammars, "b", choice(2))
    assert settle(grammars) == {"b": None}


def test_what_nobody_waits_for_any_more_is_not_compiled(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    may_go_on = threading.Event()
    compile_it = grammars._compile

    def watched(grammar: Grammar) -> object:
        begun.append(grammar.text)
        assert may_go_on.wait(60)
        return compile_it(grammar)

    monkeypatch.setattr(grammars, "_compile", watched)
    for number in range(8):
        admit(grammars, str(number), choice(number))
    eventually(lambda: len(begun) == 2)
    for number in range(6):  # two of them have begun
        grammars.release(str(number))
    admit(grammars, "again", choice(5))
    may_go_on.set()
    assert settle(grammars) == {"6": None, "7": None, "again": None}
    assert sorted(begun) == sorted(map(choice, (0, 1, 5, 6, 7)))
    # What had begun is kept for whoever asks next.
    admit(grammars, "another", choice(0))
    settle(grammars)
    assert grammars.template(choice(0)) is not None
    assert begun.count(choice(0)) == 1


def test_an_optional_grammar_that_cannot_be_compiled_is_left_out(grammars: GrammarCache) -> None:
    text = grammar(BOMBS["many choices"])
    params = SamplingParams(grammar=Grammar(text, "tools", is_optional=True))
    assert not grammars.admit(AddRequest(id="tools", prompt_token_ids=[1], params=params))
    assert settle(grammars) == {"tools": None}
    assert grammars.template(text) is NO_CONSTRAINT
