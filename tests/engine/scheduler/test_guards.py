"""Refuse calls that make no sense, with or without `assert`, and change nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.scheduler.harness import Harness
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import FinishReason, Request, RequestStatus
from tokenmill.core.sampling_params import SamplingParams


def make_request(name: str, length: int, total: int, status: RequestStatus = RequestStatus.WAITING) -> Request:
    return Request(name, [1] * length, SamplingParams(), arrival=9, max_tokens_total=total, status=status)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: make_request("0", 3, 5), "the request id 0 is in use"),
        (lambda: make_request("a", 3, 65), "65 tokens need 17 pages of the KV cache; it has 16"),
        (lambda: make_request("a", 3, 42), "42 tokens need 41 in a step without chunks; 40 fit"),
        (lambda: make_request("a", 3, 5, RequestStatus.RUNNING), "a request that arrives waits; this one is running"),
        (lambda: make_request("a", 0, 5), "a prompt of 0 tokens, and 5 tokens with its output"),
        (lambda: make_request("a", 5, 5), "a prompt of 5 tokens, and 5 tokens with its output"),
    ],
    ids=["id in use", "too many pages", "too long for a step", "running", "empty", "no room"],
)
def test_a_request_that_could_never_run_is_refused_and_changes_nothing(
    make: Callable[[], Request], sentence: str
) -> None:
    harness = Harness(num_pages=16, budget=40, chunked=False, max_model_len=40)
    harness.add([1, 2, 3], max_tokens=2)
    with pytest.raises(InvalidRequest) as refusal:
        harness.scheduler.add(make())
    assert str(refusal.value) == sentence
    assert list(harness.scheduler.requests) == ["0"]
    harness.scheduler.check_invariants()
    harness.drain()


OTHERS = "an entry point of tokenmill.policies or module:name"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"budget": 0}, "max_num_batched_tokens must be at least 1, got 0"),
        ({"num_pages": 0}, "a KV cache has a reserved page and at least one more; this one has 1"),
        (
            {"policy": "random"},
            f"--scheduling-policy must be one of fair, fcfs, priority, {OTHERS}, got 'random'",
        ),
        (
            {"batch_policy": "none"},
            f"--batch-policy must be one of mixed, decode-first, prefill-first, {OTHERS}, got 'none'",
        ),
        (
            {"admission": "all"},
            f"--admission must be one of whole-prompt, optimistic, reserve, {OTHERS}, got 'all'",
        ),
    ],
)
def test_a_scheduler_that_could_run_nothing_is_not_made(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidConfig) as refusal:
        Harness(**setting)
    assert str(refusal.value) == sentence


def test_a_guard_holds_without_asserts_too() -> None:
    script = (
        "from tests.engine.scheduler.test_guards import *\n"
        "harness = Harness(num_pages=16)\n"
        "for request in (make_request('a', 3, 5), make_request('a', 3, 5), make_request('b', 3, 999)):\n"
        "    try:\n"
        "        harness.scheduler.add(request)\n"
        "    except InvalidRequest as error:\n"
        "        print(error)\n"
    )
    run = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines() == [
        "the request id a is in use",
        "999 tokens need 250 pages of the KV cache; it has 16",
    ]


def test_a_second_request_under_an_id_is_dropped_and_the_first_one_goes_on() -> None:
    harness = Harness()
    first = harness.add([1, 2, 3], max_tokens=4)
    harness.step()
    assert harness.engine.add(AddRequest(id=first, prompt_token_ids=[7], params=SamplingParams())) == []
    harness.drain()
    assert harness.records[first].finish_reason is FinishReason.LENGTH


def test_only_one_that_waits_for_an_event_is_woken() -> None:
    harness = Harness(num_pages=30)
    held = harness.add([1, 2, 3], max_tokens=4, status=RequestStatus.WAITING_FOR_GRAMMAR)
    remote = harness.add([1, 2, 4], max_tokens=4, status=RequestStatus.WAITING_FOR_REMOTE_KV)
    session = harness.open_session([5, 6], max_tokens=1)
    running = harness.add([7, 8], max_tokens=9)
    harness.step()
    statuses = {}
    for _ in range(2):
        for request_id in (held, remote, session, running, "unknown"):
            harness.engine.wake(request_id)
        harness.scheduler.check_invariants()
        statuses = {name: request.status for name, request in harness.scheduler.requests.items()}
        assert statuses == {
            held: RequestStatus.WAITING,
            remote: RequestStatus.WAITING,
            session: RequestStatus.WAITING_FOR_INPUT,
            running: RequestStatus.RUNNING,
        }
    assert harness.extend(session, [9], max_tokens=1)
    harness.drain()
