"""Compiling under limits, and a cache that is bounded in bytes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.structured.compiler import GrammarTokenizer
from tokenmill.structured.store import Collected, GrammarStore
from tokenmill.structured.trial import Limits, TrialProcess

MIB = 1 << 20
# Each takes seconds or hundreds of MiB without limits.
BOMBS = {
    "a remainder": {"json_schema": {"type": "integer", "multipleOf": 999_983}},
    "repeated repetitions": {"lark_grammar": "start: /((a{100}){100}){100}/"},
    "many choices": {"lark_grammar": "start: " + " | ".join(f'"{number}"' for number in range(30_000))},
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
def trial(tokenizer: GrammarTokenizer) -> Iterator[TrialProcess]:
    process = TrialProcess(tokenizer, Limits(0.5, 64 * MIB))
    yield process
    process.close()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_goes_off_where_it_does_no_harm(trial: TrialProcess, name: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match="grammar"):
        trial.check(grammar(BOMBS[name]))
    # The limit is of processor time; a busy machine may take several times as long.
    assert time.monotonic() - started < 20
    assert trial.check(choice(1)) < MIB


def test_a_trial_process_that_is_gone_is_started_again(trial: TrialProcess) -> None:
    trial.check(choice(1))
    assert trial._process is not None
    os.kill(trial._process.pid, 9)
    with pytest.raises(InvalidRequest, match="could not be compiled"):
        trial.check(choice(2))
    assert trial.check(choice(2)) < MIB


def settle(store: GrammarStore) -> Collected:
    collected = Collected()
    while store.is_compiling:
        store.wait(10)
        found = store.collect()
        collected.ready.extend(found.ready)
        collected.refused.extend(found.refused)
    return collected


def open_store(tokenizer: GrammarTokenizer, max_bytes: int = 256 * MIB) -> GrammarStore:
    return GrammarStore(tokenizer, Limits(2.0, 256 * MIB), max_bytes)


@pytest.fixture
def max_bytes(tokenizer: GrammarTokenizer) -> int:
    """Room for about ten small grammars."""
    with contextlib.closing(open_store(tokenizer)) as store:
        store.admit("one", choice(1))
        settle(store)
        return 10 * store.num_bytes


@pytest.fixture
def store(tokenizer: GrammarTokenizer, max_bytes: int) -> Iterator[GrammarStore]:
    with contextlib.closing(open_store(tokenizer, max_bytes)) as store:
        yield store


def test_requests_of_one_grammar_wait_for_one_compilation(store: GrammarStore) -> None:
    assert not store.admit("a", choice(1))
    assert not store.admit("b", choice(1))
    assert not store.admit("c", grammar({"lark_grammar": "start: nothing"}))
    collected = settle(store)
    assert sorted(collected.ready) == ["a", "b"]
    assert [request_id for request_id, _ in collected.refused] == ["c"]
    assert store.admit("d", choice(1))
    with pytest.raises(InvalidRequest, match="nothing"):
        store.admit("e", grammar({"lark_grammar": "start: nothing"}))


def test_grammars_that_nobody_uses_make_room_least_recently_used_first(store: GrammarStore, max_bytes: int) -> None:
    for number in range(30):
        store.admit(str(number), choice(number))
        settle(store)
        assert store.num_bytes <= max_bytes
        store.release(str(number))
        store.admit("first", choice(0))
        settle(store)
        store.release("first")
    assert store.template(choice(0)) is not None
    assert store.template(choice(29)) is not None
    assert store.template(choice(5)) is None


def test_grammars_in_use_stay_and_bound_what_else_is_taken(store: GrammarStore, max_bytes: int) -> None:
    for number in range(20):
        store.admit(str(number), choice(number))
        collected = settle(store)
        assert store.num_bytes <= max_bytes
        if collected.refused:
            break
    assert number > 3
    assert "try again later" in str(collected.refused[0][1])
    assert all(store.template(choice(used)) is not None for used in range(number))
    # What a grammar takes is measured, and not twice the same: the room of one may not do for another.
    for used in range(3):
        store.release(str(used))
    store.admit("again", choice(number))
    assert settle(store).ready == ["again"]
    assert store.num_bytes <= max_bytes


def test_a_request_that_ends_while_its_grammar_is_compiled_is_forgotten(store: GrammarStore) -> None:
    store.admit("a", choice(1))
    store.release("a")
    assert not store.is_compiling
    store.admit("b", choice(2))
    assert settle(store).ready == ["b"]
