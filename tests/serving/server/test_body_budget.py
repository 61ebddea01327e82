"""Bound the bytes of bodies on their way, and choose the body that gives way."""

import asyncio
import contextlib

import pytest

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.errors import ServerBusy

NEVER = 60.0


async def bring(budget, *parts, then=NEVER):
    """Send these parts, and then nothing for a while; returns what was held at the end."""
    async with budget.open() as body:
        for part in parts:
            body.add(part)
            await asyncio.sleep(0)
        await asyncio.sleep(then)
        return bytes(body.data)


def test_what_is_parsed_holds_nothing_any_more():
    async def run():
        budget = BodyBudget(10)
        for _ in range(100):
            assert await bring(budget, b"12345", b"67890", then=0) == b"1234567890"
        with contextlib.suppress(ZeroDivisionError):
            async with budget.open() as body:
                body.add(b"1234567890")
                raise ZeroDivisionError
        gone = asyncio.ensure_future(bring(budget, b"1234567890"))
        await asyncio.sleep(0.01)
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        assert await bring(budget, b"1234567890", then=0) == b"1234567890"

    asyncio.run(run())


def test_the_largest_gives_way_to_those_who_send_little():
    async def run():
        budget = BodyBudget(10)
        large, small = (asyncio.ensure_future(bring(budget, part)) for part in (b"123456", b"123"))
        await asyncio.sleep(0.01)
        assert await bring(budget, b"12", then=0) == b"12"
        with pytest.raises(ServerBusy, match="--max-body-bytes-in-flight"):
            await large
        assert not small.done()
        small.cancel()

    asyncio.run(run())


def test_one_that_would_be_the_largest_itself_is_refused():
    async def run():
        budget = BodyBudget(10)
        other = asyncio.ensure_future(bring(budget, b"12345", then=0.05))
        await asyncio.sleep(0.01)
        with pytest.raises(ServerBusy):
            await bring(budget, b"123456", then=0)
        assert await other == b"12345"

    asyncio.run(run())


def test_one_that_gave_way_as_its_last_part_came_is_not_taken_for_a_short_one():
    async def run():
        budget = BodyBudget(10)
        async with budget.open() as first:
            first.add(b"123456")
            async with budget.open() as second:
                second.add(b"12345")
            first.add(b"")  # how a reader learns that this was all

    with pytest.raises(ServerBusy):
        asyncio.run(run())


def test_the_bound_holds_whatever_comes():
    async def run():
        budget = BodyBudget(1000)
        bodies = [asyncio.ensure_future(bring(budget, *[b"x" * size] * 9)) for size in range(1, 60)]
        for _ in range(20):
            await asyncio.sleep(0)
            assert sum(len(body.data) for body in budget._incoming) == budget._num_bytes <= 1000
        assert sum(body.done() for body in bodies) > 20
        for body in bodies:
            body.cancel()
        await asyncio.gather(*bodies, return_exceptions=True)
        assert budget._num_bytes == 0

    asyncio.run(run())


def test_the_flag_takes_sizes_that_leave_something():
    with pytest.raises(InvalidConfig, match="--max-body-bytes-in-flight"):
        ServerConfig(max_body_bytes_in_flight=0).resolve()
