"""A process of a server from its supervisor's view, and the callbacks of the supervisor's owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tokenmill.core.api_messages import AbortCalls, AnswerCalls, FindCalls, FromSibling
from tokenmill.core.engine_messages import EngineProgress, EngineReady, EngineStats
from tokenmill.core.messages import FromWorker
from tokenmill.core.part_messages import EngineNews, Verdict
from tokenmill.ipc.channels import Outbox
from tokenmill.serving.replicas.children import Child


class Owner(msgspec.Struct, frozen=True):
    """The callbacks through which a supervisor reports to its owner.

    Attributes:
        ended: a part has ended for good or cannot go on, so the server should end: the exit code, and a sentence.
        died: a part has died and is started again: its label, and a sentence.
        replaced: a text worker was started again: its index, the dead one's inbox, the state of the engines, and the
            verdict on the calls that the dead one prepared.
        hung: a part hangs or goes on: its label, and a sentence with its stacks.
        answered: a message of a text worker about requests, or one of another API process.
        told: an engine has sent its numbers, is ready again, or there is other news of it.
        ticked: the state of a text worker, several times a second: its index, and whether it is deaf or lost.
        line: a line that a child has written.
    """

    ended: Callable[[int, str], None]
    died: Callable[[str, str], None]
    replaced: Callable[[int, str, Sequence[EngineNews], Verdict], None]
    hung: Callable[[str, str], None]
    answered: Callable[[FromWorker | FromSibling | FindCalls | AbortCalls | AnswerCalls], None]
    told: Callable[[EngineReady | EngineStats | EngineNews], None]
    ticked: Callable[[int, bool, bool], None]
    progress: Callable[[EngineProgress], None]
    line: Callable[[str], None]


@dataclass(slots=True)
class Part:
    """One process or thread in its current life, and the arguments to start it.

    Attributes:
        label: one word for it.
        inbox: the name of its inbox, a new one for each life.
        outbox: None while it is dead: messages sent meanwhile are dropped, and sent again from a journal.
        life: number of its restarts.
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
        """Stop watching for its end."""
        if self.watcher is not None and self.watcher is not asyncio.current_task():
            self.watcher.cancel()

    async def end_process(self) -> None:
        """End the process or thread without a report; drop the messages on their way to it."""
        self.ignore()
        if self.child is not None:
            await self.child.stop()
        if self.outbox is not None:
            self.outbox.close(linger=0)
        self.child, self.outbox = None, None
