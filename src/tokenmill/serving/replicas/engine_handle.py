"""The API process's handle of one engine: its description, its state, and the calls that it answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tokenmill.core.engine_messages import (
    AdapterSeen,
    Done,
    EngineReady,
    EngineReply,
    EngineStats,
    RequestState,
    RequestStates,
    SlotSeen,
)
from tokenmill.core.errors import EngineDead
from tokenmill.core.live import ALL_KNOWN, LiveReport, ShowTurns
from tokenmill.core.messages import (
    ActOnSlot,
    EngineControl,
    ExplainRequests,
    LookAtAdapter,
    ResetPrefixCache,
    SetPaused,
    Sleep,
)
from tokenmill.serving.replicas.health import PartHealth, trouble_of
from tokenmill.serving.replicas.history import History

# Counts of things.
COUNTS = tuple(
    field.name for field in msgspec.structs.fields(EngineStats) if field.type is int and field.name != "engine"
)
# The engine answers between two steps; a step of a large prompt on a slow machine takes this long at most.
ANSWER_SECONDS = 60.0
# A file of gigabytes is written or read in a slot's action; how often its end is asked for.
SLOT_SECONDS, ASK_SECONDS = 300.0, 0.02


class EngineHandle:
    """An engine's index, readiness, stats and health, and the calls that go straight to it.

    A call returns one answer or raises an error: it never waits for ever.

    Attributes:
        health: the health of its ranks.
        ready: its description of itself, sent when it became ready; None: it still starts.
        stats: its latest numbers; None: it still starts. history: those of the last minutes.
        is_paused: it should launch no step; a restarted engine is told so again.
        is_new: it was added to a running server, and is not ready yet.
        is_draining: it gets no new requests.
    """

    def __init__(
        self,
        index: int,
        send: Callable[[EngineControl], None],
        health: Sequence[PartHealth],
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.index = index
        self.health = health
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self._send = send
        self._answer_seconds = answer_seconds
        self.is_paused = self.is_new = self.is_draining = False
        self.history = History()
        self._busy_workers: set[str] = set()
        self._is_idle = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._failure = ""
        self._open: dict[str, asyncio.Future[EngineReply]] = {}

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return self.health[0].name

    @property
    def trouble(self) -> str | None:
        """A sentence about the engine's trouble, or None."""
        return trouble_of(self.health)

    async def wait_until_ready(self) -> EngineReady:
        """Wait until the engine is ready; return its description of itself.

        Raises:
            EngineDead: the engine could not be started.
        """
        await self._is_ready.wait()
        if self._failure:
            raise EngineDead(self._failure)
        assert self.ready is not None, "set before the event"
        return self.ready

    def fail(self, why: str) -> None:
        """Mark the engine as failed to start; the first reason counts."""
        self._failure = self._failure or why
        self._is_ready.set()

    def drain(self, workers: Iterable[str]) -> None:
        """Give it no new requests; each of these text workers reports when it has none there any more."""
        self.is_draining = True
        self._busy_workers.update(workers)

    def note_idle(self, worker: str) -> None:
        """Note that a text worker has no requests there any more, or has died."""
        self._busy_workers.discard(worker)
        if self.is_draining and not self._busy_workers:
            self._is_idle.set()

    async def wait_until_idle(self) -> None:
        """Wait until the draining engine has no requests."""
        await self._is_idle.wait()

    def handle_message(self, message: EngineReady | EngineStats | EngineReply) -> None:
        """Take in a message of the engine, and hand an answer to its caller if the caller still waits."""
        match message:
            case EngineReady():
                self.ready = message
                self.is_new = False
                # Until it tells more, nothing has happened.
                nothing: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"num_pages": message.num_pages}
                self.stats = self.stats or EngineStats(**nothing)
                self._is_ready.set()
            case EngineStats():
                self.history.add(time.perf_counter(), message)
                self.stats = message
                self.health[0].note_stuck(message.is_stuck)
            case _:
                future = self._open.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)

    def lose(self) -> None:
        """Mark the engine as dead, and fail its open calls."""
        self._end_calls("has died; it is being started again")

    def leave(self) -> None:
        """Mark the engine as removed, and fail its open calls and all later ones."""
        self._end_calls("has been removed")

    def _end_calls(self, why: str) -> None:
        self.ready = None
        self._is_ready.clear()
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDead(f"{self.name} {why}"))

    async def set_paused(self, is_paused: bool) -> None:
        """Pause the engine's steps, or go on; return when no step runs any more.

        Raises:
            EngineDead: the engine gave no answer; all calls of this class raise it.
        """
        self.is_paused = is_paused
        await self._call(SetPaused(_new_id(), is_paused))

    async def reset_prefix_cache(self, preempt_running: bool, reset_external: bool = False) -> bool:
        """Forget cached prefixes; return False if running requests hold pages and may not be preempted."""
        reply = await self._call(ResetPrefixCache(_new_id(), preempt_running, reset_external))
        assert isinstance(reply, Done)
        return reply.is_done

    async def sleep(self) -> bool:
        """Have the engine give memory back until it is used again; return False if it cannot, or has requests."""
        reply = await self._call(Sleep(_new_id()))
        assert isinstance(reply, Done)
        return reply.is_done

    async def look_at_adapter(self, name: str, path: str) -> AdapterSeen:
        """Have the engine check the adapter in a folder; return its findings."""
        reply = await self._call(LookAtAdapter(_new_id(), name, path))
        assert isinstance(reply, AdapterSeen)
        return reply

    async def act_on_slot(self, slot: int, action: str, file: str) -> SlotSeen:
        """Save, restore or erase the conversation of a slot; return what became of it, once it is over."""
        ticket, deadline = _new_id(), time.monotonic() + SLOT_SECONDS
        while time.monotonic() < deadline:
            reply = await self._call(ActOnSlot(_new_id(), slot, action, file, ticket))
            assert isinstance(reply, SlotSeen)
            if reply.is_done:
                return reply
            await asyncio.sleep(ASK_SECONDS)
        raise EngineDead(f"slot {slot}: {action} has not ended in {SLOT_SECONDS:g} seconds")

    async def explain(self, request_ids: list[str]) -> list[RequestState]:
        """Return the states of those of these requests that the engine has."""
        reply = await self._call(ExplainRequests(_new_id(), request_ids))
        assert isinstance(reply, RequestStates)
        return [msgspec.structs.replace(state, engine=self.index) for state in reply.states]

    async def show_turns(self, since: int, shows_requests: bool, shows_tree: bool) -> LiveReport:
        """Return a report of the engine's turns after `since`; see `ShowTurns`."""
        return await self._show(ShowTurns(_new_id(), since, shows_requests, shows_tree))

    async def show_prefix(self, number: int) -> list[int]:
        """Return the first token ids of an edge of the prefix tree; empty: it is no longer there."""
        return (await self._show(ShowTurns(_new_id(), ALL_KNOWN, False, False, number))).prefix

    async def _show(self, asked: ShowTurns) -> LiveReport:
        reply = await self._call(asked)
        assert isinstance(reply, LiveReport)
        return reply

    async def _call(self, message: EngineControl) -> EngineReply:
        if self.ready is None:
            raise EngineDead(f"{self.name} is being started")
        future: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        self._open[message.id] = future
        try:
            self._send(message)
            async with asyncio.timeout(self._answer_seconds):
                return await future
        except TimeoutError as error:
            raise EngineDead(f"{self.name} has not answered for {self._answer_seconds:g} seconds") from error
        finally:
            del self._open[message.id]


def _new_id() -> str:
    return secrets.token_hex(12)
