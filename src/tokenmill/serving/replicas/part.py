"""A process of a server as its supervisor knows it, and whom the supervisor tells what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.core.api_messages import AbortCalls, FindCalls, FromSibling
from tokenmill.core.engine_messages import EngineProgress, EngineReady, EngineStats
from tokenmill.core.messages import FromWorker
from tokenmill.core.part_messages import EngineNews, Verdict
from tokenmill.ipc.channels import Outbox
from tokenmill.serving.replicas.children import Child


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom a supervisor tells what.

    Attributes:
        ended: a part has ended for good or cannot go on, so that the server should: the exit code, and a sentence.
        died: a part has died and is started again: what to call it in a field, and a sentence.
        replaced: a text worker is there again: its index, the inbox of the dead one, how the engines are, and what its
            death says of the calls that it prepared.
        hung: a part hangs or goes on: what to call it in a field, and a sentence with its stacks.
        answered: what a text worker says of requests, or another API process.
        told: an engine has sent its numbers, is ready once more, or there is other news of it.
        ticked: how a text worker does, several times a second: it takes no messages now, or nobody should wait for it.
        line: what children write to standard error.
    """

    ended: Callable[[int, str], None]
    died: Callable[[str, str], None]
    replaced: Callable[[int, str, Sequence[EngineNews], Verdict], None]
    hung: Callable[[str, str], None]
    answered: Callable[[FromWorker | FromSibling | FindCalls | AbortCalls], None]
    told: Callable[[EngineReady | EngineStats | EngineNews], None]
    ticked: Callable[[int, bool, bool], None]
    progress: Callable[[EngineProgress], None]
    line: Callable[[str], None]


@dataclass(slots=True)
class Part:
    """One process, or thread, as it is now, and how it is started.

    Attributes:
        label: one word for it.
        inbox: the name of its inbox; each life has its own.
        outbox: None while it is dead: what is sent meanwhile is dropped, and comes again from a journal.
        life: how often it has been started again.
        child: None while it is dead.
    """

    called: str
    label: str
    module: str
    arguments: tuple[str, ...]
    inbox: str
    outbox: Outbox | None
    life: int = 0
    child: Child | None = None
    watcher: asyncio.Task[None] | None = None

    def ignore(self) -> None:
        """Its end is no news any more."""
        if self.watcher is not None and self.watcher is not asyncio.current_task():
            self.watcher.cancel()

    async def end(self) -> None:
        """End what is left of it, unnoticed; what is on its way to it is dropped."""
        self.ignore()
        if self.child is not None:
            await self.child.stop()
        if self.outbox is not None:
            self.outbox.close(linger=0)
        self.child, self.outbox = None, None
