"""The store of sessions, without a server: order of turns, bounds, owners, and what makes room."""

import asyncio

import pytest

from tokenmill.core.errors import Conflict, NotFound, QueueFull, TooLarge, Unavailable
from tokenmill.serving.server import session_store
from tokenmill.serving.server.session_store import MAX_SESSION_BYTES, MAX_WAITING, SessionStore, is_session_id


def play(scenario):
    async def run():
        return await scenario(SessionStore())

    return asyncio.run(run())


def test_turns_begin_one_after_the_other_whichever_leaves():
    async def scenario(store):
        session = store.open("", "text")
        first, second, third, fourth = (session.accept(str(number)) for number in range(4))
        assert [turn.has_begun for turn in session.turns] == [True, False, False, False]
        store.end_turn(session, second, is_kept=False)  # its client has left
        assert [turn.has_begun for turn in session.turns] == [True, False, False]
        store.end_turn(session, first, is_kept=True)
        assert third.has_begun
        assert not fourth.has_begun
        store.end_turn(session, third, is_kept=True)
        store.end_turn(session, fourth, is_kept=True)
        assert (store.turns["kept"], store.turns["dropped"]) == (3, 1)
        assert session.expires is not None

    play(scenario)


def test_an_abort_ends_those_that_wait_and_tells_the_one_that_runs():
    async def scenario(store):
        session = store.open("", "text")
        ended = []
        first, second = session.accept("a"), session.accept("b")
        first.end_requests = lambda: ended.append("a")
        assert session.abort() == 2
        third = session.accept("c")
        assert ended == ["a"]
        with pytest.raises(Conflict):
            await second.begins
        store.end_turn(session, first, is_kept=True)
        assert third.has_begun, "it came after the abort"
        store.end_turn(session, second, is_kept=False)
        assert third.has_begun

    play(scenario)


def test_only_so_many_wait_and_only_so_many_sessions_are_open(monkeypatch):
    monkeypatch.setattr(session_store, "MAX_OF_OWNER", 2)
    monkeypatch.setattr(session_store, "MAX_SESSIONS", 3)

    async def scenario(store):
        session = store.open("one", "text")
        for number in range(MAX_WAITING + 1):
            session.accept(str(number))
        with pytest.raises(QueueFull):
            session.accept("more")
        idle = store.open("one", "chat")
        with pytest.raises(QueueFull):
            store.open("one", "chat")
        store.open("two", "chat")
        new = store.open("three", "chat")
        with pytest.raises(NotFound):
            store.get("one", idle.id)  # of the owner that has most, the one that is idle
        assert (len(store), store.ended["evicted"]) == (3, 1)
        for one in (*store.of("two"), new):
            one.accept("busy")
        with pytest.raises(Unavailable):
            store.open("four", "chat")

    play(scenario)


def test_bytes_are_bounded_for_each_and_for_all(monkeypatch):
    monkeypatch.setattr(session_store, "MAX_BYTES", 1000)

    async def scenario(store):
        small, large, own = store.open("one", "chat"), store.open("two", "chat"), store.open("one", "chat")
        with pytest.raises(TooLarge):
            small.check_room(MAX_SESSION_BYTES + 1)
        store.keep_messages(small, [{}], 100)
        store.keep_messages(large, [{}], 700)
        own.accept("a")
        store.keep_messages(own, [{}], 300)
        assert [one.id for one in store.of("one")] == [small.id, own.id]
        assert store.of("two") == []

    play(scenario)


def test_a_session_is_its_owners_alone_and_expires():
    async def scenario(store):
        session = store.open("one", "text", idle_timeout=0.001)
        assert is_session_id(session.id)
        assert not is_session_id("sess_mine")
        with pytest.raises(NotFound):
            store.get("two", session.id)
        turn = session.accept("label")
        await asyncio.sleep(0.01)
        assert store.get("one", session.id) is session, "one with a turn stays"
        assert store.with_turn("one", "label") == (session, turn)
        assert store.with_turn("two", "label") is None
        store.end_turn(session, turn, is_kept=False)
        while len(store):
            await asyncio.sleep(0.001)
        assert store.ended["expired"] == 1
        # One that is closed is not waited for again.
        closed = store.open("one", "text")
        turn = closed.accept("label")
        store.close(closed)
        store.end_turn(closed, turn, is_kept=True)
        assert closed.expires is None

    play(scenario)
