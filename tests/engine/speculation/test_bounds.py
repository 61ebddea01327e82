"""Nothing that a client can send makes a drafter slow, large or forgetful."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from tests.engine.speculation.requests import make_request, say
from tests.engine.speculation.slow_model import places_behind
from tokenmill.engine.speculation.drafts import TextDrafter
from tokenmill.engine.speculation.finished_outputs import FinishedOutputs
from tokenmill.engine.speculation.speculation import NgramDrafter
from tokenmill.engine.speculation.suffix import SuffixDrafter

DRAFTERS: dict[str, Callable[[], TextDrafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def de_bruijn(alphabet: int, length: int) -> list[int]:
    """Every word of this length once, by the shortest text that has them all (Fredricksen, Kessler, Maiorana)."""
    word, text = [0] * (length + 1), list[int]()

    def extend(place: int, period: int) -> None:
        if place > length:
            text.extend(word[1 : period + 1] if length % period == 0 else [])
            return
        word[place] = word[place - period]
        extend(place + 1, period)
        for token in range(word[place - period] + 1, alphabet):
            word[place] = token
            extend(place + 1, place)

    extend(1, 1)
    return text


TEXTS = {
    "one token": [3] * 100_000,
    "two in turn": [3, 4] * 50_000,
    "every pair": de_bruijn(100, 2) * 2,
    "every word of seven": de_bruijn(3, 7) * 4,
    "deep and then not": [*range(10, 40), 1, 2, 3, 4, 5, 6, *range(50, 60)] * 300 + [1, 2, 3, 4, 5, 6],
}


def lines_run(call: Callable[[], object]) -> int:
    """Count the lines of Python that a call executes: its work, without that of numpy and slices."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_call_does_little_whatever_the_text(kind: str, name: str) -> None:
    drafter = DRAFTERS[kind]()
    text = TEXTS[name]
    finished = make_request("finished", [0])
    say(finished, text)
    drafter.forget_request(finished)
    request = make_request("a", text)
    for _ in range(len(text) // 2048):
        assert not len(drafter.propose(request, 24).token_ids), "has not read all of it yet"
    drafter.propose(request, 24)
    for token in text[:64]:
        say(request, [token])
        assert lines_run(lambda: drafter.propose(request, 24)) < 1500


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("is_random", [False, True])
def test_a_token_of_a_request_takes_half_a_kilobyte(kind: str, is_random: bool, rng: np.random.Generator) -> None:
    request = make_request("a", rng.integers(0, 150_000, 60_000).tolist() if is_random else [3] * 60_000)
    drafter = DRAFTERS[kind]()
    tracemalloc.start()
    try:
        for _ in range(31):
            drafter.propose(request, 8)
        taken, _ = tracemalloc.get_traced_memory()
        drafter.forget_request(request)
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 8 < taken / request.num_tokens < {"ngram": 700, "suffix": 560}[kind]
    assert left < 4_000_000, "what is left is the room for finished outputs"


def test_finished_outputs_keep_to_their_bounds(rng: np.random.Generator) -> None:
    for _ in range(40):
        max_requests, max_tokens = int(rng.integers(1, 20)), int(rng.integers(4, 200))
        outputs = FinishedOutputs(max_requests, max_tokens, (3, 6))
        added: list[list[int]] = []
        for _ in range(100):
            tokens = rng.integers(0, 3, rng.integers(2, 40 if rng.random() < 0.9 else 300)).tolist()
            outputs.add(np.array(tokens, dtype=np.int32))
            added.append(tokens[-(max_tokens - 1) :])
            kept = added[-outputs.num_outputs :]
            assert 0 < outputs.num_outputs <= max_requests
            assert sum(len(output) + 1 for output in kept) <= max_tokens
            assert len(outputs.tokens) == max_tokens
            check_places(outputs, kept, rng.integers(0, 3, 8).tolist())


def check_places(outputs: FinishedOutputs, kept: list[list[int]], end: list[int]) -> None:
    """The places found are some of those behind the longest context that any kept output has, each once."""
    length, places = outputs.longest_context(end, 0, 8)
    counts = {needed: sum(len(places_behind(text, end[-needed:])) for text in kept) for needed in (3, 6)}
    followed = [outputs.copy_from(place, 1000) for place in places]
    expected = [text[place:] for text in kept for place in places_behind(text, end[-length:])] if length else []
    assert len(set(places)) == len(places) <= counts.get(length, 0)
    for one in followed:
        assert one in expected, "found in what has left, or across two outputs"
        expected.remove(one)
    # A crowded bucket may hide what is old, never what is newest.
    newest = places_behind(kept[-1], end[-6:])
    assert not newest or (length == 6 and followed[0] == kept[-1][newest[0] :])


def test_outputs_stay_while_there_is_room() -> None:
    outputs = FinishedOutputs(10, 100, (3, 6))
    for number in range(10):
        outputs.add(np.arange(9, dtype=np.int32) + 10 * number)
        assert outputs.num_outputs == number + 1
    outputs.add(np.arange(9, dtype=np.int32))
    assert outputs.num_outputs == 10
    outputs.add(np.arange(200, 250, dtype=np.int32))
    assert outputs.num_outputs == 5, "six of ten make room: 51 places, and each had 10"


def test_drafters_import_no_torch() -> None:
    modules = ", ".join(f"tokenmill.engine.speculation.{name}" for name in ("speculation", "suffix"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
