"""The grammars of an engine: compiled off its loop, shared by requests, forgotten by least recent use.

A grammar that cannot be compiled has its reason kept if the reason is its own: the failure of a process is not.

The cache is a gate of the engine (`engine/loop/gates.py`): a request waits at it until its grammar is compiled.

One thread (the engine's) calls everything but `template`, which the runner's thread calls too.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tokenmill.core.errors import InvalidRequest, Refusal, Unavailable
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import RequestStatus
from tokenmill.core.sampling_params import Grammar
from tokenmill.ipc.sandbox import Limits
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.model.structured.trial import GrammarTrial

_logger = logging.getLogger(__name__)

# Two, so that one grammar that takes all of its time does not hold up the next.
_NUM_THREADS = 2
_NICENESS = 10
# What a small grammar takes; its own fork finds that much among the memory it already has.
_LEAST_BYTES = 64 << 10
# Stands for the template of a grammar that a request does without.
NO_CONSTRAINT = object()
# Grammars whose fault is remembered: a few hundred bytes each.
MOST_FAULTS = 256


@dataclass(slots=True)
class _Entry:
    """A compiled grammar."""

    num_bytes: int
    template: Any
    users: set[str] = field(default_factory=set)


class GrammarCache:
    """Compiles grammars and keeps them.

    Attributes:
        num_bytes: size of all kept grammars. Above `max_bytes` those without a request go, least recently used first;
            if those in use exceed it, further grammars are refused until some end.
    """

    status = RequestStatus.WAITING_FOR_GRAMMAR

    def __init__(self, tokenizer: GrammarTokenizer, limits: Limits, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._compiler = GrammarCompiler(tokenizer)
        self._trial = GrammarTrial(tokenizer, limits)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._faults = _Faults()
        self._text_of: dict[str, str] = {}
        self._waiting: dict[str, list[str]] = {}
        self._compiling: dict[str, Future[_Entry]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def admit(self, message: AddRequest) -> bool:
        """Return True if the request needs no grammar, or one that is there already; else begin to compile it.

        Raises:
            InvalidRequest: the grammar is known to be unusable.
        """
        grammar = message.params.grammar
        if grammar is None:
            return True
        text = grammar.text
        entry = self._entries.get(text)
        if entry is not None:
            self._entries.move_to_end(text)
            entry.users.add(message.id)
        elif (fault := self._faults.of(text)) is not None:
            raise fault
        else:
            self._waiting.setdefault(text, []).append(message.id)
            if text not in self._compiling:
                self._compiling[text] = self._threads().submit(self._compile, grammar)
        self._text_of[message.id] = text
        return entry is not None

    def collect(self, timeout: float) -> dict[str, Refusal | None]:
        """Return the requests whose grammar has been compiled or refused since the last call."""
        if timeout:
            wait(list(self._compiling.values()), timeout, return_when="FIRST_COMPLETED")
        news: dict[str, Refusal | None] = {}
        for text in [text for text, future in self._compiling.items() if future.done()]:
            refusal = self._keep(text, self._compiling.pop(text))
            for request_id in self._waiting.pop(text, ()):
                news[request_id] = refusal
                if refusal is None:
                    self._entries[text].users.add(request_id)
                else:
                    del self._text_of[request_id]
            self._evict()
        return news

    def release(self, request_id: str) -> None:
        """Forget a request, and cancel a compilation that has not begun and that no other request waits for."""
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
        """Return the compiled grammar, to be deep-copied; None only if no living request needs it.

        `NO_CONSTRAINT`: it was optional, and cannot be compiled.
        """
        entry = self._entries.get(text)
        return None if entry is None else entry.template

    def close(self) -> None:
        """End the threads and the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar", initializer=_yield_to_steps)
        return self._pool

    def _compile(self, grammar: Grammar) -> _Entry:
        """Compile a grammar in a thread: on trial where it can do no harm, then here."""
        text = grammar.text
        try:
            num_bytes = self._trial.check(text) + len(text) + _LEAST_BYTES
            if num_bytes > self._max_bytes:
                raise InvalidRequest(f"the grammar takes {num_bytes >> 20} MiB; at most {self._max_bytes >> 20}")
            return _Entry(num_bytes, self._compiler.template(text, grammar.marks))
        except InvalidRequest as error:
            if not grammar.is_optional:
                raise
            _logger.warning("a request's tools go without a grammar: %s", error)
            return _Entry(len(text) + _LEAST_BYTES, NO_CONSTRAINT)

    def _keep(self, text: str, future: Future[_Entry]) -> Refusal | None:
        """Keep what was compiled, or the grammar's own fault; return why requests are refused."""
        error = future.exception()
        if isinstance(error, InvalidRequest):
            self._faults.add(text, error)
            return error
        if error is not None:
            _logger.error("a grammar could not be compiled: %s", error, exc_info=_unexpected(error))
            return Unavailable("the grammar could not be compiled now; try again")
        entry = future.result()
        in_use = sum(other.num_bytes for other in self._entries.values() if other.users)
        if in_use + entry.num_bytes > self._max_bytes:
            return InvalidRequest("the grammars in use leave no room for this one; try again later")
        self._entries[text] = entry
        self.num_bytes += entry.num_bytes
        return None

    def _evict(self) -> None:
        if self.num_bytes <= self._max_bytes:
            return
        for text, entry in list(self._entries.items()):
            if not entry.users:
                del self._entries[text]
                self.num_bytes -= entry.num_bytes
                if self.num_bytes <= self._max_bytes:
                    return


class _Faults:
    """Reasons why the last requested grammars cannot be compiled. Keeps digests, since texts may be long."""

    def __init__(self) -> None:
        self._errors: OrderedDict[bytes, InvalidRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._errors)

    def of(self, text: str) -> InvalidRequest | None:
        """Return the fault of a grammar, if it is remembered."""
        key = _digest(text)
        if key not in self._errors:
            return None
        self._errors.move_to_end(key)
        return self._errors[key].with_traceback(None)  # else it would grow each time that it is raised

    def add(self, text: str, error: InvalidRequest) -> None:
        """Remember a fault, and forget the least recently used beyond `MOST_FAULTS`."""
        self._errors[_digest(text)] = error
        if len(self._errors) > MOST_FAULTS:
            self._errors.popitem(last=False)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _unexpected(error: BaseException) -> BaseException | None:
    """Return the error whose traceback belongs in the log; None for the loss of a process."""
    return None if isinstance(error, Unavailable) else error


def _yield_to_steps() -> None:
    """Lower this thread's priority, so that compiling takes only what the engine's steps leave."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
