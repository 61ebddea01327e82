"""Engines that are asked together, while one of them is removed."""

from __future__ import annotations

import asyncio

import pytest

from tokenmill.core.engine_messages import Done
from tokenmill.core.errors import EngineDead
from tokenmill.core.live import LiveReport, ShowTurns
from tokenmill.core.messages import ResetPrefixCache
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.replicas.engines import Engines
from tokenmill.serving.replicas.health import PartHealth


class Pair:
    """Two engines that are ready; what they are asked is kept."""

    def __init__(self) -> None:
        self.asked: dict[int, ResetPrefixCache | ShowTurns] = {}
        self.engines = Engines(self._handle(index) for index in range(2))

    def _handle(self, index: int) -> EngineHandle:
        handle = EngineHandle(index, lambda message: self.asked.update({index: message}), [PartHealth("an engine", 9)])
        handle.ready = object()  # type: ignore[assignment]  # what it said of itself plays no part here
        return handle


def test_an_engine_that_is_removed_is_not_waited_for() -> None:
    async def work() -> None:
        pair = Pair()
        call = asyncio.ensure_future(pair.engines.reset_prefix_cache(False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pair.engines.remove(1)
        pair.engines[0].handle_message(Done(pair.asked[0].id, True))
        assert await asyncio.wait_for(call, 10)
        assert [engine.index for engine in pair.engines] == [0]

    asyncio.run(work())


def test_nor_are_its_requests_and_prefixes() -> None:
    async def work() -> None:
        pair = Pair()
        requests = asyncio.ensure_future(pair.engines.show_requests())
        prefix = asyncio.ensure_future(pair.engines.show_prefix(1, 7))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked = pair.asked[0]
        pair.engines.remove(1)
        report = LiveReport(id=asked.id, now=1.0, num_turns=0, turns=[], num_requests=3)
        pair.engines[0].handle_message(report)
        assert await asyncio.wait_for(requests, 10) == [(0, report)]
        assert await asyncio.wait_for(prefix, 10) == []
        assert await pair.engines.show_prefix(1, 7) == []

    asyncio.run(work())


def test_every_engine_is_told_what_to_forget() -> None:
    async def work() -> None:
        pair = Pair()
        call = asyncio.ensure_future(pair.engines.reset_prefix_cache(False, reset_external=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [(asked.preempt_running, asked.reset_external) for asked in pair.asked.values()] == [(False, True)] * 2
        for index, asked in pair.asked.items():
            pair.engines[index].handle_message(Done(asked.id, True))
        assert await asyncio.wait_for(call, 10)

    asyncio.run(work())


def test_an_engine_that_dies_leaves_the_call_without_an_answer() -> None:
    async def work() -> None:
        pair = Pair()
        call = asyncio.ensure_future(pair.engines.reset_prefix_cache(False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pair.engines[1].lose()
        pair.engines[0].handle_message(Done(pair.asked[0].id, True))
        with pytest.raises(EngineDead, match="started again"):
            await asyncio.wait_for(call, 10)

    asyncio.run(work())
