"""Change the engines of a running server: add one, remove one, or replace all by engines with new weights.

With new weights no request changes engines: requests that have begun end where they are, and all later ones go to the
new engines.

    old   ──────────── drains ──── idle, ends
    new        loads ─ takes all new requests ────────
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

from tokenmill.config.model_files import check_model
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import Conflict, EngineDead, InvalidCheckpoint, InvalidRequest, NotFound
from tokenmill.serving.replicas.supervisor import Supervisor


class Fleet:
    """Changes the engines of a supervisor, one change at a time."""

    def __init__(self, parts: Supervisor) -> None:
        self._parts = parts
        self._changing = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    async def add(self) -> int:
        """Add an engine with the weights of the others; return its index once it takes requests.

        Raises:
            Conflict: another change is under way, or it cannot be started.
        """
        async with self._change():
            models = {spec.model for spec in self._parts.topology.engines}
            if len(models) > 1:
                raise Conflict("engines with other weights still have requests")
            return (await self._start(models.pop())).engine

    def drain(self, index: int) -> None:
        """Give an engine no new requests.

        Raises:
            NotFound: no engine has this index.
            Conflict: no other engine would be left for new requests.
        """
        self._check_is_spared(index)
        self._parts.drain_engine(index)

    def remove(self, index: int, patience: float) -> None:
        """Drain an engine, and end it once idle, or after `patience` seconds: others then continue its requests.

        Raises:
            NotFound, Conflict: see `drain`.
        """
        self.drain(index)
        self._leave(self._remove(index, patience))

    async def replace_weights(self, model: str) -> EngineReady:
        """Replace all engines by ones with another checkpoint's weights; return the description of the first.

        Return once the first takes requests. The other engines are replaced one by one as they become idle.

        Raises:
            InvalidRequest: the checkpoint cannot take the place of the served one.
            Conflict: another change is under way, or it cannot be started: there may be no memory for both.
        """
        async with self._change():
            old = [engine.index for engine in self._parts.engines]
            ready = self._parts.engines.ready
            if ready is None:
                raise Conflict("no engine takes requests now")
            await asyncio.to_thread(_check_model, model)
            if _folder(model) == Path(ready.model).resolve():
                raise InvalidRequest(
                    "the engines run from this folder already: put new weights into another one", "model_path"
                )
            new = await self._start(model, (0, len(old)))
            if (trouble := _difference(ready, new)) is not None:
                await self._parts.remove_engine(new.engine)
                raise InvalidRequest(trouble, "model_path")
            for index in old:
                self._parts.drain_engine(index, is_bound=True)
            self._leave(self._replace(old, model))
            return new

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        if self._changing.locked() or self._leaving:
            raise Conflict("the engines are being changed already; try again later")
        async with self._changing:
            yield

    async def _start(self, model: str, share: tuple[int, int] | None = None) -> EngineReady:
        try:
            return await self._parts.add_engine(model, share)
        except EngineDead as error:
            raise Conflict(f"the new engine cannot be started: {error}") from error

    def _check_is_spared(self, index: int) -> None:
        takers = [engine.index for engine in self._parts.engines if not engine.is_draining]
        if index not in self._parts.engines:
            raise NotFound(f"no engine has the number {index}")
        if takers in ([], [index]):
            raise Conflict("no other engine takes requests")

    def _leave(self, leaving: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(leaving)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _remove(self, index: int, patience: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._parts.engines[index].wait_until_idle()
        await self._parts.remove_engine(index)

    async def _replace(self, old: list[int], model: str) -> None:
        for number, index in enumerate(old):
            await self._remove(index, None)
            if number + 1 < len(old):
                await self._start(model, (number + 1, len(old)))


def _check_model(model: str) -> None:
    """Check a checkpoint's path before an engine starts in vain, at the cost of memory and cores."""
    try:
        check_model(model)
    except InvalidCheckpoint as error:
        raise InvalidRequest(f"model_path: {error}", "model_path") from None
    except (OSError, ValueError, RuntimeError):
        raise InvalidRequest("model_path must be a path", "model_path") from None


def _folder(model: str) -> Path:
    try:
        return Path(model).resolve()
    except (OSError, ValueError, RuntimeError):
        raise InvalidRequest("model_path must be a path", "model_path") from None


def _difference(old: EngineReady, new: EngineReady) -> str | None:
    """Return the reason why a model cannot replace another behind the same text workers, or None if it can."""
    for what in ("architecture", "vocab_size", "num_parameters"):
        before, after = getattr(old, what, None), getattr(new, what, None)
        if before != after:
            return f"{what} is {after}, that of the served model {before}"
    if new.max_model_len < old.max_model_len:
        return f"its context is {new.max_model_len} tokens, that of the served model {old.max_model_len}"
    return None
