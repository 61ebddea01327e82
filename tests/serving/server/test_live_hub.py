"""The hub asks while somebody watches, once for all, and waits for no viewer."""

import asyncio
import contextlib
import itertools
import time
from types import SimpleNamespace

import msgspec
import pytest

from tokenmill.core.errors import EngineDead
from tokenmill.core.live import MOST_TURNS, LiveReport, LiveTurn
from tokenmill.serving.replicas.history import FIELDS, SECONDS_KEPT, History
from tokenmill.serving.server import live_hub
from tokenmill.serving.server.live_hub import LiveHub


class FakeEngine:
    """Turns at will; `asked` are the turns that were known at each question."""

    def __init__(self, index=0, num_turns=0):
        self.index = index
        self.num_turns = num_turns
        self.asked = []
        self.is_dead = False
        self.ready = self.stats = None
        self.history = History()

    async def show_turns(self, since, shows_requests, shows_tree):
        self.asked.append(since)
        if self.is_dead:
            raise EngineDead("it is being started again")
        turns = [
            LiveTurn(number, 0.0, 0.0, 0.0, 0.0, 0, "", "", [], [], [])
            for number in range(since + 1, min(self.num_turns, since + MOST_TURNS) + 1)
        ]
        last = turns[-1].number if turns else since
        now = time.perf_counter()
        return LiveReport(id="x", now=now, num_turns=last, turns=turns, tree=[] if shows_tree else None)


async def frames(hub, count):
    """The first frames that a viewer gets."""
    async with asyncio.timeout(10), contextlib.aclosing(hub.watch()) as watched:
        return [msgspec.json.decode(await anext(watched)) for _ in range(count)]


def numbers(found):
    return [turn[0] for frame in found for turn in frame["turns"]]


def test_nobody_is_asked_before_somebody_watches_and_after_the_last_has_left():
    async def run():
        engine = FakeEngine()
        hub = LiveHub([engine], interval=0.001)
        await asyncio.sleep(0.02)
        assert engine.asked == []
        await frames(hub, 3)
        num_asked = len(engine.asked)
        assert num_asked >= 3
        await asyncio.sleep(0.02)
        assert len(engine.asked) <= num_asked + 1
        assert len(asyncio.all_tasks()) == 1, "nothing is left running"
        assert (await frames(hub, 1))[0]["is_whole"], "who comes later begins anew"

    asyncio.run(run())


def test_a_viewer_gets_each_turn_once_and_a_later_one_what_was_before():
    async def run():
        engine = FakeEngine(num_turns=MOST_TURNS + 7)
        hub = LiveHub([engine], interval=0.001)
        first = asyncio.ensure_future(frames(hub, 200))
        found = await frames(hub, 4)
        assert numbers(found) == list(range(1, MOST_TURNS + 8))
        engine.num_turns += 1
        await asyncio.sleep(0.01)
        (whole,) = await frames(hub, 1)
        assert whole["is_whole"]
        assert numbers([whole]) == list(range(1, MOST_TURNS + 9))
        assert numbers(await first) == list(range(1, MOST_TURNS + 9))

    asyncio.run(run())


def test_five_viewers_cost_the_engine_what_one_does():
    async def run(num_viewers):
        engine = FakeEngine()
        hub = LiveHub([engine], interval=0.01)
        found = await asyncio.gather(*(frames(hub, 10) for _ in range(num_viewers)))
        assert all(one == found[0] for one in found)
        return len(engine.asked)

    assert abs(asyncio.run(run(5)) - asyncio.run(run(1))) <= 1


def test_a_viewer_that_does_not_read_is_let_go_and_the_others_stay():
    async def run():
        hub = LiveHub([FakeEngine()], interval=0.0005)
        async with contextlib.aclosing(hub.watch()) as idle:
            await anext(idle)
            await frames(hub, 2 * live_hub._QUEUE)
            async with asyncio.timeout(10):
                assert [frame async for frame in idle] == [], "it ends at once, and nothing old is kept for it"

    asyncio.run(run())


def test_an_engine_that_dies_is_named_and_shown_again_when_it_is_back(monkeypatch):
    monkeypatch.setattr(live_hub, "RETRY_SECONDS", 0.01)

    async def run():
        engines = [FakeEngine(0, 3), FakeEngine(1, 2)]
        hub = LiveHub(engines, interval=0.001)
        async with asyncio.timeout(10), contextlib.aclosing(hub.watch()) as watched:
            engines[0].is_dead = True
            told = [msgspec.json.decode(await anext(watched)) for _ in range(20)]
            assert {frame["trouble"] for frame in told if frame["engine"] == 0} == {"it is being started again"}
            assert numbers([frame for frame in told if frame["engine"] == 1]) == [1, 2]
            engines[0].is_dead = False
            async for frame in watched:
                data = msgspec.json.decode(frame)
                if data["engine"] == 0 and "turns" in data:
                    assert (data["is_whole"], numbers([data])) == (True, [1, 2, 3])
                    break
            gone = engines.pop(0)
            async for frame in watched:
                if msgspec.json.decode(frame) == {"engine": gone.index, "is_gone": True}:
                    break

    asyncio.run(run())


def test_the_end_of_the_server_ends_every_viewer():
    async def run():
        hub = LiveHub([FakeEngine()], interval=0.001)

        async def watch_to_the_end():
            async with contextlib.aclosing(hub.watch()) as watched:
                return [frame async for frame in watched]

        viewers = [asyncio.ensure_future(watch_to_the_end()) for _ in range(3)]
        await asyncio.sleep(0.02)
        hub.close()
        async with asyncio.timeout(10):
            await asyncio.gather(*viewers)

    asyncio.run(run())


def test_there_are_so_many_places_for_viewers_and_no_more():
    async def run():
        hub = LiveHub([FakeEngine()], interval=0.001)
        async with contextlib.AsyncExitStack() as stack:
            for _ in itertools.repeat(None, live_hub.MAX_VIEWERS):
                assert not hub.is_full
                await anext(await stack.enter_async_context(contextlib.aclosing(hub.watch())))
            assert hub.is_full
        assert not hub.is_full

    asyncio.run(run())


@pytest.mark.parametrize("kept", [live_hub.TURNS_KEPT])
def test_what_is_kept_for_later_viewers_is_bounded(kept):
    async def run():
        engine = FakeEngine(num_turns=3 * kept)
        hub = LiveHub([engine], interval=0.001)
        async with contextlib.aclosing(hub.watch()) as watched:
            async for frame in watched:
                turns = msgspec.json.decode(frame)["turns"]
                if turns and turns[-1][0] == engine.num_turns:
                    break
            (whole,) = await frames(hub, 1)
            assert numbers([whole]) == list(range(2 * kept + 1, 3 * kept + 1))

    asyncio.run(run())


def counts(**given):
    return SimpleNamespace(**dict.fromkeys(FIELDS, 0) | given)


def test_numbers_from_before_somebody_watched_are_shown_to_all():
    async def run():
        engine = FakeEngine()
        now = time.perf_counter()
        for ago, tokens in ((SECONDS_KEPT + 10, 5), (7, 20), (6.5, 30)):
            engine.history.add(now - ago, counts(generation_tokens=tokens))
        hub = LiveHub([engine], interval=0.001)
        async with asyncio.timeout(10), contextlib.aclosing(hub.watch()) as watched:
            first = msgspec.json.decode(await anext(watched))
            engine.history.add(time.perf_counter(), counts(generation_tokens=100))
            told = []
            while len(told) < 2:  # what came after a pause, and what was at its end
                told += msgspec.json.decode(await anext(watched))["samples"]
            (later,) = await frames(hub, 1)
        tokens = 1 + FIELDS.index("generation_tokens")
        assert [sample[tokens] for sample in first["samples"]] == [5, 20, 30], "what is old is gone; a pause is flat"
        assert [sample[tokens] for sample in told] == [30, 100]
        assert later["samples"] == first["samples"] + told

    asyncio.run(run())
