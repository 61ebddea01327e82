"""All engines of a server together: what is asked of each of them, and their numbers as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import count
from typing import TypeVar

from tokenmill.core.engine_messages import AdapterSeen, EngineReady, EngineStats, RequestState
from tokenmill.core.errors import EngineDead
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
        """What an engine that takes new requests says of itself; None: none does."""
        return next((engine.ready for engine in self if engine.ready and not engine.is_draining), None)

    def add(self, handle: EngineHandle) -> None:
        """One more; those who ask all do not see it before it is ready."""
        handle.is_new = True
        self._handles[handle.index] = handle

    def remove(self, index: int) -> None:
        """It is gone, and with it what it was asked."""
        self._handles.pop(index).leave()

    def unused_index(self) -> int:
        """The lowest that no engine has."""
        return next(index for index in count() if index not in self._handles)

    async def wait_until_ready(self) -> list[EngineReady]:
        """What they say of themselves, once all do."""
        return await asyncio.gather(*(engine.wait_until_ready() for engine in self))

    @property
    def stats(self) -> EngineStats:
        """The counts of those that have told any, added up."""
        told = [engine.stats for engine in self if engine.stats is not None]
        return EngineStats(**{name: sum(getattr(stats, name) for stats in told) for name in COUNTS})

    async def set_paused(self, is_paused: bool) -> None:
        """See `EngineHandle`; of all of them, as are those below."""
        await self._ask_all(lambda engine: engine.set_paused(is_paused))

    async def reset_prefix_cache(self, preempt_running: bool, reset_external: bool = False) -> bool:
        """False where one of them has refused; the others have forgotten theirs."""
        return all(await self._ask_all(lambda engine: engine.reset_prefix_cache(preempt_running, reset_external)))

    async def look_at_adapter(self, name: str, path: str) -> list[AdapterSeen]:
        """What each of them makes of an adapter."""
        return await self._ask_all(lambda engine: engine.look_at_adapter(name, path))

    async def explain(self, request_ids: list[str]) -> list[RequestState]:
        """How those of the requests that any of them has are doing."""
        states = await self._ask_all(lambda engine: engine.explain(request_ids))
        return [state for some in states for state in some]

    async def _ask_all(self, ask: Callable[[EngineHandle], Awaitable[Answer]]) -> list[Answer]:
        """What each answers. Of one that is removed meanwhile nothing is wanted any more."""

        async def ask_one(engine: EngineHandle) -> list[Answer]:
            try:
                return [await ask(engine)]
            except EngineDead:
                if self._handles.get(engine.index) is engine:
                    raise
                return []

        return [answer for some in await asyncio.gather(*map(ask_one, self)) for answer in some]
