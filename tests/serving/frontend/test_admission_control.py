"""The bounds of the queue, and the answer to a refused client."""

from __future__ import annotations

import pytest

from tokenmill.core.errors import QueueFull
from tokenmill.core.messages import GenerateText
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.frontend.admission_control import (
    LONGEST_RETRY_SECONDS,
    AdmissionControl,
    AdmissionLimits,
    estimated_tokens,
)


def prompt(*ids: str, text: str = "abcd" * 10, **fields: object) -> GenerateText:
    return GenerateText(ids=list(ids), params=SamplingParams(n=max(1, len(ids))), text=text, **fields)


def limit(rows: int = 2, **limits: int) -> AdmissionControl:
    queue = AdmissionControl(AdmissionLimits(**limits))
    queue.num_rows = rows
    return queue


def test_without_limits_everything_may_wait() -> None:
    limit().check([prompt("a")], num_open=10**6)


def test_requests_that_find_a_row_do_not_count_as_waiting() -> None:
    queue = limit(rows=2, max_requests=0)
    queue.check([prompt("a", "b")], num_open=0)
    queue.check([prompt("a", "b", "c", "d")], num_open=0)
    with pytest.raises(
        QueueFull, match="0 requests wait already for a row or KV pages and this call brings 1; at most 0 may wait"
    ):
        queue.check([prompt("c")], num_open=2)


def test_the_queue_takes_as_many_as_its_limit_beyond_the_rows() -> None:
    queue = limit(rows=2, max_requests=3)
    queue.check([prompt("a")], num_open=4)
    with pytest.raises(QueueFull):
        queue.check([prompt("a")], num_open=5)
    with pytest.raises(QueueFull):
        queue.check([prompt("a", "b")], num_open=4)


def test_one_call_that_is_too_much_by_itself_is_told_so() -> None:
    queue = limit(rows=4, max_requests=2)
    with pytest.raises(QueueFull, match="0 requests wait already for a row or KV pages and this call brings 7;"):
        queue.check([prompt(*"abcdefg")], num_open=1)


def test_requests_that_wait_for_pages_count_too() -> None:
    queue = limit(rows=100, max_requests=3)
    queue.num_queued = 3
    with pytest.raises(
        QueueFull, match="3 requests wait already for a row or KV pages and this call brings 1; at most 3 may wait"
    ):
        queue.check([prompt("a")], num_open=5)


def test_waiting_prompt_tokens_are_limited_until_their_first_token() -> None:
    queue = limit(max_tokens=25)
    first = prompt("a", "b")
    queue.check([first], num_open=0)
    queue.enter(first)
    queue.enter(prompt("c"))
    with pytest.raises(
        QueueFull, match="about 20 prompt tokens wait already to be computed and this call brings about 10; at most 25"
    ):
        queue.check([prompt("d")], num_open=3)
    queue.started("a")
    queue.check([prompt("d")], num_open=3)
    queue.ended("a", True)
    queue.ended("c", False)
    queue.check([prompt("d", text="x" * 200)], num_open=1)


def test_a_refused_client_is_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tokenmill.serving.frontend.admission_control.time.monotonic", lambda: now[0])
    queue = limit(rows=1, max_requests=4)

    def told() -> int:
        with pytest.raises(QueueFull) as refused:
            queue.check([prompt("x")], num_open=8)
        return refused.value.retry_after

    assert told() == 1, "nothing has been measured yet"
    for second in range(10):
        now[0] = 3.0 * second
        queue.ended(str(second), True)
        queue.ended(f"refused {second}", False)
    assert told() == 11, "four over the limit, one of them done every 2.7 seconds"
    now[0] = 1e9
    assert told() == LONGEST_RETRY_SECONDS


@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        (GenerateText(ids=[], params=SamplingParams(), token_ids=[1, 2, 3]), 3),
        (GenerateText(ids=[], params=SamplingParams(), text="five!"), 2),
        (GenerateText(ids=[], params=SamplingParams(), text="\ud800"), 1),
        (GenerateText(ids=[], params=SamplingParams(), messages=[{"content": "12345678"}, {"role": "user"}]), 2),
    ],
)
def test_the_size_of_a_prompt_is_guessed_before_it_is_encoded(message: GenerateText, tokens: int) -> None:
    assert estimated_tokens(message) == tokens
