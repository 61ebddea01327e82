"""Count the values of a body before it is decoded, and read long bodies beside the loop."""

import asyncio
import json
import random
import threading

import msgspec
import pytest

from tokenmill.core.errors import TooLarge
from tokenmill.serving.server.http import body_structure
from tokenmill.serving.server.http.body_structure import MAX_SPELLED_BYTES, MAX_STRUCTURE, check_structure
from tokenmill.serving.server.http.body_threads import HUGE_BYTES, INLINE_BYTES, BodyThreads

ODD = ['"', "\\", "\\\\", '\\"', ",", "[", "{", ":", "]", "}", "\n", "\t", "\u2028", "水", "😀", "x", "\x7f"]


def weight(value) -> int:
    """Return the count of `check_structure`, from the value itself."""
    if isinstance(value, dict):
        return 2 + 6 * len(value) + max(0, len(value) - 1) + sum(map(weight, value.values()))
    if isinstance(value, list):
        return 2 + max(0, len(value) - 1) + sum(map(weight, value))
    return 0


def draw(rng: random.Random, depth: int = 0):
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind == 0:
        return rng.choice([None, True, 1.5, 10**15, -3])
    if kind in (1, 2):
        return "".join(rng.choices(ODD, k=rng.randrange(30)))
    if kind in (3, 4):
        return [draw(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {f"{rng.choice(ODD)}{i}": draw(rng, depth + 1) for i in range(rng.randrange(6))}


def test_only_what_stands_outside_of_strings_counts(rng, monkeypatch):
    """Try all contents of strings, and all ends of the pieces in which a body is looked at."""
    drawn = random.Random(int(rng.integers(2**32)))
    for _ in range(300):
        value = draw(drawn)
        body = json.dumps(value, ensure_ascii=drawn.random() < 0.5, separators=(",", ":")).encode()
        assert msgspec.json.decode(body) == value
        monkeypatch.setattr(body_structure, "_PIECE_BYTES", drawn.randrange(1, 40))
        monkeypatch.setattr(body_structure, "MAX_STRUCTURE", weight(value))
        check_structure(body)
        check_structure(bytearray(body))
        monkeypatch.setattr(body_structure, "MAX_STRUCTURE", weight(value) - 1)
        if weight(value):
            with pytest.raises(TooLarge):
                check_structure(body)


@pytest.mark.parametrize("part", ["[],", "{},", '"",', "0,", '{"a":0},', '{"type":"text","text":"x"},'])
def test_more_than_can_be_made_at_once_is_refused(part):
    count = 4 * MAX_STRUCTURE // len(part)
    with pytest.raises(TooLarge, match="too many parts"):
        check_structure(f"[{part * count}0]".encode() if len(part) > 3 else f"[{part * MAX_STRUCTURE}0]".encode())
    check_structure(f"[{part * (MAX_STRUCTURE // 20)}0]".encode())


def test_a_text_may_hold_what_looks_like_structure():
    check_structure(json.dumps({"prompt": "{a:[1,2,3]}," * 1_300_000}).encode())


@pytest.mark.parametrize(("character", "size"), [("水", 3), ("\\n", 6), ("é", 2), ("\\u0041", 6)])
def test_texts_that_must_be_spelled_out_are_shorter(character, size):
    most = MAX_SPELLED_BYTES // size
    check_structure(f'"{character * most}"'.encode())
    with pytest.raises(TooLarge, match="not ASCII"):
        check_structure(f'"{character * (most + 1)}"'.encode())


def test_long_bodies_are_read_in_threads_and_short_ones_by_the_loop():
    async def names():
        threads = BodyThreads()
        sizes = (INLINE_BYTES, INLINE_BYTES + 1, HUGE_BYTES, HUGE_BYTES + 1)
        return [await threads.run(size, lambda: threading.current_thread().name) for size in sizes]

    assert asyncio.run(names()) == [threading.current_thread().name, "long-body_0", "long-body_0", "huge-body_0"]


def test_what_is_long_waits_for_nothing_huge_and_the_loop_for_neither():
    async def scenario():
        threads, may_end = BodyThreads(), threading.Event()
        huge = asyncio.ensure_future(threads.run(HUGE_BYTES + 1, may_end.wait))
        for size in (1, HUGE_BYTES):
            assert await threads.run(size, lambda: "read") == "read"
        assert not huge.done()
        may_end.set()
        assert await huge

    asyncio.run(scenario())
