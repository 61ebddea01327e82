"""Questions from the API process straight to the engine, each with one answer or an error: nothing waits for ever."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from tokenmill.errors import EngineDead
from tokenmill.messages import (
    Done,
    EngineControl,
    EngineReply,
    ExplainRequests,
    RequestState,
    RequestStates,
    ResetPrefixCache,
    SetPaused,
)

# The engine answers between two steps; a step of a large prompt on a slow machine takes this long at most.
ANSWER_SECONDS = 60.0


class EngineCalls:
    """Sends control messages and hands the answers to whoever asked."""

    def __init__(self, send: Callable[[EngineControl], None], answer_seconds: float = ANSWER_SECONDS) -> None:
        self._send = send
        self._answer_seconds = answer_seconds
        self._open: dict[str, asyncio.Future[EngineReply]] = {}

    async def set_paused(self, is_paused: bool) -> None:
        """Let the engine launch no step, or go on; returns when no step runs any more.

        Raises:
            EngineDead: it gave no answer; so do all calls of this class.
        """
        await self._call(SetPaused(_new_id(), is_paused))

    async def reset_prefix_cache(self, preempt_running: bool) -> bool:
        """Forget cached prefixes; False where running requests hold pages and may not be preempted."""
        reply = await self._call(ResetPrefixCache(_new_id(), preempt_running))
        assert isinstance(reply, Done)
        return reply.is_done

    async def explain(self, request_ids: list[str]) -> list[RequestState]:
        """How those of the requests that the engine has are doing."""
        reply = await self._call(ExplainRequests(_new_id(), request_ids))
        assert isinstance(reply, RequestStates)
        return reply.states

    def dispatch(self, reply: EngineReply) -> None:
        """Hand an answer to whoever waits for it, if somebody still does."""
        future = self._open.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _call(self, message: EngineControl) -> EngineReply:
        future: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        self._open[message.id] = future
        try:
            self._send(message)
            async with asyncio.timeout(self._answer_seconds):
                return await future
        except TimeoutError as error:
            raise EngineDead(f"the engine has not answered for {self._answer_seconds:g} seconds") from error
        finally:
            del self._open[message.id]


def _new_id() -> str:
    return secrets.token_hex(12)
