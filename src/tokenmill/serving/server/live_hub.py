"""Ask the engines what they do while viewers watch, and give all viewers the same frames.

Engines are asked four times a second however many viewers there are; with none, not at all. A frame is encoded once.
A viewer that does not read is disconnected, never waited for: its page connects again and gets what it missed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from tokenmill.core.errors import EngineDead
from tokenmill.core.live import MOST_TURNS, LiveReport, LiveTurn
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.replicas.engines import Engines
from tokenmill.serving.replicas.history import SECONDS_KEPT, Sample

INTERVAL = 0.25
# Requests are told of every so many reports, the tree more rarely.
REQUESTS_EVERY = 2
TREE_EVERY = 8
# How long to leave an engine alone that gives no answer, in seconds, and how often to look which engines there are.
RETRY_SECONDS = 1.0
MAX_VIEWERS = 64
# As many as the engine itself keeps.
TURNS_KEPT = 1000
# Frames of some ten seconds.
_QUEUE = 48
_READY = ("max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "max_model_len", "speculation")
# Frames that are the first of an engine, and the first of a viewer, have these; `owners` change with each iteration.
_ONLY_WHOLE = ("owners",)
_STATS = (
    "num_running",
    "num_waiting",
    "num_rows_used",
    "num_pages",
    "num_pages_pinned",
    "num_pages_evictable",
    "num_preemptions",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens",
    "generation_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
    "waiting_by_reason",
)
Frame = dict[str, Any]


class _Viewer:
    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE)

    def give(self, frame: bytes) -> None:
        """Queue a frame; if the queue is full, empty it and end the viewer."""
        if self.frames.full():
            self.end_stream()
        else:
            self.frames.put_nowait(frame)

    def end_stream(self) -> None:
        while not self.frames.empty():
            self.frames.get_nowait()
        self.frames.put_nowait(None)


class _Memory:
    """The turns and the latest state of one engine, for new viewers.

    Attributes:
        sampled_at: when the last of its samples was taken, by the clock of this process.
    """

    def __init__(self) -> None:
        self.turns: deque[LiveTurn] = deque(maxlen=TURNS_KEPT)
        self.samples: deque[Sample] = deque()
        self.sampled_at = float("-inf")
        self.latest: Frame = {}

    def add_frame(self, frame: Frame) -> None:
        """Add the news of a frame, and forget what the engine has forgotten."""
        self.turns.extend(frame["turns"])
        while self.turns and self.turns[0].at < frame["kept_since"]:
            self.turns.popleft()
        self.samples.extend(frame["samples"])
        while self.samples and self.samples[0][0] < frame["now"] - SECONDS_KEPT:
            self.samples.popleft()
        self.latest |= frame

    def whole(self) -> Frame:
        """Return a frame for a viewer that knows nothing yet."""
        return self.latest | {"turns": list(self.turns), "samples": list(self.samples), "is_whole": True}


class LiveHub:
    """Follows the engines of one server for all its viewers."""

    def __init__(self, engines: Engines, interval: float = INTERVAL) -> None:
        self._engines = engines
        self._interval = interval
        self._viewers: set[_Viewer] = set()
        self._memories: dict[int, _Memory] = {}
        self._followers: dict[int, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """True if no further viewer may come."""
        return len(self._viewers) >= MAX_VIEWERS

    async def watch(self) -> AsyncGenerator[bytes]:
        """Yield frames as JSON for one viewer, until it leaves, does not read, or the server ends."""
        viewer = _Viewer()
        for memory in self._memories.values():
            if memory.latest:
                viewer.give(msgspec.json.encode(memory.whole()))
        self._viewers.add(viewer)
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._keep())
        try:
            while (frame := await viewer.frames.get()) is not None:
                yield frame
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._rest()

    def close(self) -> None:
        """End the streams of all viewers, because the server ends."""
        for viewer in self._viewers:
            viewer.end_stream()

    def _rest(self) -> None:
        """Stop asking the engines and forget all frames, as the last viewer has left."""
        for task in (self._keeper, *self._followers.values()):
            if task is not None:
                task.cancel()
        self._keeper = None
        self._followers.clear()
        self._memories.clear()

    async def _keep(self) -> None:
        """Follow all engines, including those that come later."""
        while True:
            there = {engine.index: engine for engine in self._engines}
            for index in self._followers.keys() - there.keys():
                self._followers.pop(index).cancel()
                del self._memories[index]
                self._tell({"engine": index, "is_gone": True})
            for index in there.keys() - self._followers.keys():
                self._memories[index] = _Memory()
                self._followers[index] = asyncio.ensure_future(self._follow(there[index], self._memories[index]))
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, engine: EngineHandle, memory: _Memory) -> None:
        since = count = 0
        while True:
            try:
                report = await engine.show_turns(since, count % REQUESTS_EVERY == 0, count % TREE_EVERY == 0)
            except EngineDead as error:
                since = count = 0
                memory.turns.clear()
                self._tell({"engine": engine.index, "trouble": str(error)})
                await asyncio.sleep(RETRY_SECONDS)
                continue
            frame = _frame(engine, report, memory, is_first=since == 0)
            memory.add_frame(frame)
            self._tell(frame if since == 0 else {name: frame[name] for name in frame if name not in _ONLY_WHOLE})
            since, count = report.num_turns, count + 1
            if len(report.turns) < MOST_TURNS:
                await asyncio.sleep(self._interval)

    def _tell(self, frame: Frame) -> None:
        encoded = msgspec.json.encode(frame)
        for viewer in self._viewers:
            viewer.give(encoded)


def _frame(engine: EngineHandle, report: LiveReport, memory: _Memory, is_first: bool) -> Frame:
    frame: Frame = {"engine": engine.index, "now": report.now, "turns": report.turns, "is_whole": is_first}
    # The state is that of now, the turns are not yet.
    frame["is_behind"] = len(report.turns) >= MOST_TURNS
    frame |= {"kept_since": report.kept_since, "owners": report.owners, "num_requests": report.num_requests}
    # An engine on another machine has a clock of its own.
    shift = report.now - time.perf_counter()
    samples = engine.history.since(memory.sampled_at)
    frame["samples"] = [(at + shift, *values) for at, *values in samples]
    if samples:
        memory.sampled_at = samples[-1][0]
    if report.requests is not None:
        frame["requests"] = report.requests
        frame["ready"] = {name: getattr(engine.ready, name) for name in _READY}
    if report.tree is not None:
        frame["tree"] = report.tree
    if engine.stats is not None:
        frame["stats"] = {name: getattr(engine.stats, name) for name in _STATS}
    return frame
