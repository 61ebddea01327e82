"""The grammars of an engine: compiled off its loop, shared by requests, forgotten by least recent use.

The cache is a gate of the engine (`engine/gates.py`): a request waits at it until its grammar is compiled.

One thread (the engine's) calls everything but `template`, which the runner's thread calls too.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import RequestStatus
from tokenmill.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.structured.sandbox import Limits, Sandbox

# Two, so that one grammar that takes all of its time does not hold up the next.
_NUM_THREADS = 2
_NICENESS = 10
# What a small grammar takes; its own fork finds that much among the memory it already has.
_LEAST_BYTES = 64 << 10


@dataclass(slots=True)
class _Entry:
    """A compiled grammar, or why there is none."""

    num_bytes: int
    template: Any = None
    error: InvalidRequest | None = None
    users: set[str] = field(default_factory=set)


class GrammarCache:
    """Compiles grammars and keeps them.

    Attributes:
        num_bytes: what the kept grammars take together. Those that no request uses go, least recently used first, when
            it exceeds `max_bytes`; when those in use do, further grammars are refused until some end.
    """

    status = RequestStatus.WAITING_FOR_GRAMMAR

    def __init__(self, tokenizer: GrammarTokenizer, limits: Limits, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._compiler = GrammarCompiler(tokenizer)
        self._sandboxes = _Sandboxes(tokenizer, limits)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._text_of: dict[str, str] = {}
        self._waiting: dict[str, list[str]] = {}
        self._compiling: dict[str, Future[_Entry]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def admit(self, message: AddRequest) -> bool:
        """See `Gate`: True if the request needs no grammar, or one that is there already.

        Raises:
            InvalidRequest: the grammar is known to be unusable.
        """
        if message.params.grammar is None:
            return True
        text = message.params.grammar.text
        entry = self._entries.get(text)
        if entry is not None:
            self._entries.move_to_end(text)
            if entry.error is not None:
                raise entry.error
            entry.users.add(message.id)
        else:
            self._waiting.setdefault(text, []).append(message.id)
            if text not in self._compiling:
                self._compiling[text] = self._threads().submit(self._compile, text)
        self._text_of[message.id] = text
        return entry is not None

    def collect(self, timeout: float) -> dict[str, InvalidRequest | None]:
        """See `Gate`: settles what has been compiled since the last call."""
        if timeout:
            wait(list(self._compiling.values()), timeout, return_when="FIRST_COMPLETED")
        news: dict[str, InvalidRequest | None] = {}
        for text in [text for text, future in self._compiling.items() if future.done()]:
            entry = self._keep(text, self._compiling.pop(text))
            for request_id in self._waiting.pop(text, ()):
                news[request_id] = entry.error
                if entry.error is None:
                    entry.users.add(request_id)
                else:
                    del self._text_of[request_id]
            self._evict()
        return news

    def release(self, request_id: str) -> None:
        """See `Gate`."""
        text = self._text_of.pop(request_id, None)
        if text is None:
            return
        if text in self._entries:
            self._entries[text].users.discard(request_id)
            self._evict()
        if request_id in self._waiting.get(text, ()):
            self._waiting[text].remove(request_id)
            if not self._waiting[text]:
                del self._waiting[text]
                # One that has begun ends within its limits, and is kept: whoever left may come again.
                if self._compiling[text].cancel():
                    del self._compiling[text]

    def template(self, text: str) -> Any | None:
        """The compiled grammar, to be deep-copied; None only when no request that is alive needs it."""
        entry = self._entries.get(text)
        return None if entry is None else entry.template

    def close(self) -> None:
        """End the threads and the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._sandboxes.close()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar", initializer=_yield_to_steps)
        return self._pool

    def _compile(self, text: str) -> _Entry:
        """In a thread: try it where it can do no harm, then here."""
        try:
            num_bytes = self._sandboxes.check(text) + len(text) + _LEAST_BYTES
            if num_bytes > self._max_bytes:
                raise InvalidRequest(f"the grammar takes {num_bytes >> 20} MiB; at most {self._max_bytes >> 20}")
            return _Entry(num_bytes, self._compiler.compile(text))
        except InvalidRequest as error:
            return _Entry(len(text), error=error)

    def _keep(self, text: str, future: Future[_Entry]) -> _Entry:
        """Enter what was compiled, unless there is no room for it now."""
        if future.exception() is not None:
            return _Entry(0, error=InvalidRequest("the grammar could not be compiled"))
        entry = future.result()
        in_use = sum(other.num_bytes for other in self._entries.values() if other.users)
        if in_use + entry.num_bytes > self._max_bytes:
            return _Entry(0, error=InvalidRequest("the grammars in use leave no room for this one; try again later"))
        self._entries[text] = entry
        self.num_bytes += entry.num_bytes
        return entry

    def _evict(self) -> None:
        if self.num_bytes <= self._max_bytes:
            return
        for text, entry in list(self._entries.items()):
            if not entry.users:
                del self._entries[text]
                self.num_bytes -= entry.num_bytes
                if self.num_bytes <= self._max_bytes:
                    return


class _Sandboxes:
    """One sandbox for each thread that compiles."""

    def __init__(self, tokenizer: GrammarTokenizer, limits: Limits) -> None:
        self._make: Callable[[], Sandbox] = lambda: Sandbox(tokenizer, limits)
        self._own = threading.local()
        self._all: list[Sandbox] = []

    def check(self, text: str) -> int:
        """See `Sandbox.check`."""
        if not hasattr(self._own, "process"):
            self._own.process = self._make()
            self._all.append(self._own.process)
        process: Sandbox = self._own.process
        return process.check(text)

    def close(self) -> None:
        """End them all."""
        for process in self._all:
            process.close()


def _yield_to_steps() -> None:
    """Compiling takes what the steps of the engine leave."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
