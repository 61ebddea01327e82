"""All engines of a server together: calls to each of them, and the sum of their numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import count
from typing import TypeVar

from tokenmill.core.engine_messages import AdapterSeen, EngineReady, EngineStats, RequestState
from tokenmill.core.errors import EngineDead
from tokenmill.core.live import ALL_KNOWN, LiveReport
from tokenmill.serving.replicas.engine_handle import COUNTS, EngineHandle

Answer = TypeVar("Answer")


class Engines:
    """The handles of the engines, by their index."""

    def __init__(self, handles: Iterable[EngineHandle]) -> None:
        self._handles = {handle.index: handle for handle in handles}

    def __iter__(self) -> Iterator[EngineHandle]:
        return iter([handle for handle in self._handles.values() if not handle.is_new])

    def __contains__(self, index: int) -> bool:
        return index in self._handles

    def __getitem__(self, index: int) -> EngineHandle:
        return self._handles[index]

    @property
    def ready(self) -> EngineReady | None:
        """Description of an engine that takes new requests, or None without one."""
        return next((engine.ready for engine in self if engine.ready and not engine.is_draining), None)

    def add(self, handle: EngineHandle) -> None:
        """Add an engine; iteration and calls to all engines skip it until it is ready."""
        handle.is_new = True
        self._handles[handle.index] = handle

    def remove(self, index: int) -> None:
        """Remove an engine, and fail its open calls."""
        self._handles.pop(index).leave()

    def unused_index(self) -> int:
        """Return the lowest index that no engine has."""
        return next(index for index in count() if index not in self._handles)

    async def wait_until_ready(self) -> list[EngineReady]:
        """Wait until all engines are ready; return their descriptions of themselves."""
        return await asyncio.gather(*(engine.wait_until_ready() for engine in self))

    @property
    def stats(self) -> EngineStats:
        """Sum of the counts of all engines that have reported any."""
        told = [engine.stats for engine in self if engine.stats is not None]
        return EngineStats(**{name: sum(getattr(stats, name) for stats in told) for name in COUNTS})

    async def set_paused(self, is_paused: bool) -> None:
        """Pause all engines, or let them go on; see `EngineHandle` for this and the calls below."""
        await self._ask_all(lambda engine: engine.set_paused(is_paused))

    async def reset_prefix_cache(self, preempt_running: bool, reset_external: bool = False) -> bool:
        """Forget the cached prefixes of all engines; return False if one refused (the others have forgotten theirs)."""
        return all(await self._ask_all(lambda engine: engine.reset_prefix_cache(preempt_running, reset_external)))

    async def sleep(self) -> bool:
        """Have all engines give memory back; return False if one refused."""
        return all(await self._ask_all(lambda engine: engine.sleep()))

    async def look_at_adapter(self, name: str, path: str) -> list[AdapterSeen]:
        """Have each engine check an adapter; return their findings."""
        return await self._ask_all(lambda engine: engine.look_at_adapter(name, path))

    async def explain(self, request_ids: list[str]) -> list[RequestState]:
        """Return the states of those of these requests that any engine has."""
        states = await self._ask_all(lambda engine: engine.explain(request_ids))
        return [state for some in states for state in some]

    async def show_requests(self) -> list[tuple[int, LiveReport]]:
        """Return the index of each engine, and its report with its requests."""

        async def ask(engine: EngineHandle) -> tuple[int, LiveReport]:
            return engine.index, await engine.show_turns(ALL_KNOWN, shows_requests=True, shows_tree=False)

        return await self._ask_all(ask)

    async def show_prefix(self, index: int, number: int) -> list[int]:
        """Return the first token ids of an edge of an engine's prefix tree; empty: the edge or the engine is gone."""
        asked = [engine for engine in self if engine.index == index]
        found = await self._ask_all(lambda engine: engine.show_prefix(number), asked)
        return found[0] if found else []

    async def _ask_all(
        self, ask: Callable[[EngineHandle], Awaitable[Answer]], engines: Iterable[EngineHandle] | None = None
    ) -> list[Answer]:
        """Call engines, all by default; return the answers, without those of engines that are removed meanwhile."""

        async def ask_one(engine: EngineHandle) -> list[Answer]:
            try:
                return [await ask(engine)]
            except EngineDead:
                if self._handles.get(engine.index) is engine:
                    raise
                return []

        return [
            answer
            for some in await asyncio.gather(*map(ask_one, self if engines is None else engines))
            for answer in some
        ]
