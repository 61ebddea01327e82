"""The choice of the text worker that a call goes through."""

import pytest

from tokenmill.core.errors import EngineDead
from tokenmill.serving.frontend.worker_turns import WorkerTurns


def test_calls_go_round_and_past_those_that_are_avoided():
    turns = WorkerTurns(3)
    assert [turns.next() for _ in range(4)] == [0, 1, 2, 0]
    turns.avoid(1, True)
    assert [turns.next() for _ in range(3)] == [2, 0, 2]
    turns.avoid(1, False)
    assert turns.next() == 0


def test_a_session_stays_with_its_worker_and_takes_nobodys_turn():
    turns = WorkerTurns(3)
    names = [f"session {number}" for number in range(30)]
    home = {name: turns.next(name) for name in names}
    assert set(home.values()) == {0, 1, 2}
    assert turns.next() == 0
    assert {name: turns.next(name) for name in names} == home
    turns.avoid(home[names[0]], True)
    assert turns.next(names[0]) != home[names[0]]
    turns.avoid(home[names[0]], False)
    assert turns.next(names[0]) == home[names[0]]


def test_with_nobody_left_a_call_is_refused():
    turns = WorkerTurns(1)
    turns.avoid(0, True)
    with pytest.raises(EngineDead):
        turns.next("session")
