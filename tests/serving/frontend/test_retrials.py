"""Suspects are prepared alone, one after the other; what comes meanwhile waits in line and loses nothing."""

import asyncio

import pytest

from tokenmill.core.messages import AbortRequests, GenerateText
from tokenmill.core.part_messages import Retrial, Verdict
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.text_queries import EncodeText
from tokenmill.serving.frontend.client import KILLS_WORKERS, EngineClient, RejectedRequest
from tokenmill.serving.frontend.retrials import Retrials


def prompt(*ids):
    return GenerateText(ids=list(ids), params=SamplingParams(), text="x")


def test_nobody_waits_while_nobody_is_under_suspicion():
    retrials = Retrials(lambda ids: None)
    assert not retrials.holds_back and not retrials.is_on and retrials.next() is None


def test_each_suspect_is_alone_and_others_follow_in_order():
    cleared = []
    retrials = Retrials(cleared.append)
    retrials.begin_trials(["a", "b"], ended=["gone"])
    assert cleared == [["gone"]]
    messages = [prompt("a", "a2"), EncodeText(id="b", text="x"), prompt("c"), prompt("d")]
    for message in messages:
        assert retrials.holds_back
        retrials.wait(message, 1)
    assert retrials.next() == (messages[0], 1) and retrials.is_on
    retrials.prepares(messages[0])
    assert retrials.next() is None, "a thread has it, and it is alone"
    retrials.finished("a")
    assert retrials.next() == (messages[1], 1) and retrials.is_on
    retrials.finished("b")
    assert not retrials.is_on and retrials.holds_back, "others do not overtake those that wait"
    assert [retrials.next(), retrials.next()] == [(message, 1) for message in messages[2:]]
    assert not retrials.holds_back
    assert cleared == [["gone"], ["a"], ["b"]]


def test_who_is_aborted_in_line_has_no_turn():
    cleared = []
    retrials = Retrials(cleared.append)
    retrials.begin_trials(["a", "b"], ended=[])
    for message in (prompt("a"), prompt("b"), prompt("c", "d")):
        retrials.wait(message, 1)
    retrials.abort(["b", "d"])
    assert cleared == [["b"]]
    left = [retrials.next(), retrials.next(), retrials.next(), retrials.next()]
    assert left == [(prompt("a"), 1), (prompt("c", "d"), 1), (AbortRequests(["d"]), 0), None]


def text_of_call(text):
    return GenerateText(ids=[], params=SamplingParams(n=2), text=text)


async def first_output(generation):
    return await anext(generation)


def test_the_successor_gets_suspects_first_and_convicts_never():
    sent = []
    client = EngineClient([sent.append])
    calls = {text: client.generate([text_of_call(text)]) for text in "abcd"}
    ids = {message.text: message.ids for message in sent}
    sent.clear()
    client.replace(0, "worker-0", [], Verdict([ids["c"][0], "gone"], [ids["b"][0]]))
    assert sent[0] == Retrial([ids["c"][0]], ended=["gone"])
    assert [message.text for message in sent[1:]] == ["c", "a", "d"]
    assert sorted(client.open_ids) == sorted(ids["a"] + ids["c"] + ids["d"])
    with pytest.raises(RejectedRequest, match=KILLS_WORKERS) as convicted:
        asyncio.run(first_output(calls["b"]))
    assert convicted.value.status == 500
