"""Watch the parts of a server: count their silence, ping their loops, and report once when a part hangs.

It only notices; the callback of each tick decides where calls go meanwhile. While all parts rest it looks seldom.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tokenmill.core.part_messages import Beat, Pong, SignOfLife
from tokenmill.ipc.heartbeat import REST_SECONDS
from tokenmill.serving.replicas.health import PartHealth, trouble_of

TICK_SECONDS = 0.5
# So often it is looked whether this process itself was held up.
LOOK_SECONDS = 0.1


class HangWatch:
    """Owns the health of the parts, by the names of their inboxes."""

    def __init__(
        self,
        ping: Callable[[str], None],
        stacks: Callable[[str], Awaitable[str]],
        say: Callable[[str, str], None],
        on_tick: Callable[[str, PartHealth], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            ping: sends a ping to a part.
            stacks: returns the stacks of a part's threads, or the reason why there are none.
            say: takes a part and a report on it, with its stacks.
            on_tick: called with each part at each tick.
            clock: seconds.
        """
        self.parts: dict[str, PartHealth] = {}
        self._ping = ping
        self._stacks = stacks
        self._say = say
        self._on_tick = on_tick
        self._clock = clock
        self._hanging: set[str] = set()
        self._reported: set[str] = set()
        self._reports: set[asyncio.Task[None]] = set()

    def started(self) -> None:
        """Mark all parts as started."""
        for part in self.parts.values():
            part.started()

    def forget_part(self, name: str) -> None:
        """Forget a part that was removed."""
        del self.parts[name]
        self._hanging.discard(name)
        self._reported.discard(name)

    def has_reported(self, name: str) -> bool:
        """Return True if a part hangs and its stacks have been reported."""
        return name in self._reported

    def note_sign(self, name: str, message: SignOfLife) -> None:
        """Take in a beat or a pong of a part."""
        part = self.parts[name]
        match message:
            case Beat():
                part.beats(message)
            case Pong():
                part.answers()

    @property
    def trouble(self) -> str | None:
        """Sentences about the parts that hang, or None."""
        return trouble_of(self.parts.values())

    async def run(self) -> None:
        """Watch until cancelled."""
        listened = 0.0
        while True:
            listened += await self._listen()
            if listened >= TICK_SECONDS - LOOK_SECONDS / 2:
                self.tick(listened)
                listened = 0.0

    async def _listen(self) -> float:
        """Sleep for a moment; return how much of it counts as silence, without the time this process was held up."""
        pause = REST_SECONDS if self._all_rest else LOOK_SECONDS
        began = self._clock()
        await asyncio.sleep(pause)
        return min(self._clock() - began, pause)

    @property
    def _all_rest(self) -> bool:
        return bool(self.parts) and all(part.is_resting and part.trouble is None for part in self.parts.values())

    def tick(self, seconds: float) -> None:
        """Count `seconds` of listening, ping the parts, and report those that begin or cease to hang."""
        for name, part in list(self.parts.items()):
            part.pass_time(seconds)
            if not part.is_starting and not part.waits_for_pong:
                part.is_asked()
                self._ping(name)
            self._note(name, part)
            self._on_tick(name, part)

    def _note(self, name: str, part: PartHealth) -> None:
        trouble = part.trouble
        if trouble is None:
            if name in self._hanging:
                self._hanging.remove(name)
                self._reported.discard(name)
                self._say(name, f"{part.name} goes on")
        elif name not in self._hanging:
            self._hanging.add(name)
            task = asyncio.ensure_future(self._report(name, trouble))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _report(self, name: str, trouble: str) -> None:
        # In one line: it goes the way of all lines of the log, where a line feed is shown and not obeyed.
        try:
            lines = (await self._stacks(name)).splitlines()
        except OSError as error:  # a full disk, or too many open files: it is killed all the same
            lines = [f"its stacks cannot be read: {error.strerror}"]
        self._say(name, " | ".join([trouble, *(line.strip() for line in lines if line.strip())]))
        if name in self._hanging:
            self._reported.add(name)
