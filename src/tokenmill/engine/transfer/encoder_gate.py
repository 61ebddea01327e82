"""Requests that wait for encoder outputs from elsewhere, and what the scheduler is told of them.

A request arrives, and each of its contents that the engine has no output of is looked up: in the store, where it costs
a call, or with an encoder server, which takes as long as encoding. Only then the request waits, without row and pages,
so that others run. An output that has come lies in the store and is loaded by the step that needs it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from tokenmill.core.errors import Refusal
from tokenmill.core.extension import EngineExtension, Host
from tokenmill.core.media import MediaInput
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.request import RequestStatus
from tokenmill.core.transfers import Encoded


class Outputs(Protocol):
    """The part of `StoredOutputs` that is needed here."""

    def has(self, digest: str) -> bool:
        """Return True if the output of a content can be loaded."""

    def take_failed(self) -> list[str]:
        """Return the digests whose loads have failed since the last call."""

    def close(self) -> None:
        """Let go of the store."""


class Encoders(Protocol):
    """Encoder servers; answers come by a thread."""

    def ask(self, one: MediaInput, answer: Callable[[bool], None]) -> None:
        """Have a content encoded and its output stored; `answer` is called once, with True if it is there."""

    def close(self) -> None:
        """Ask nothing more."""


class NoEncoders(Encoders):
    """Stands for encoder servers where there are none."""

    def ask(self, one: MediaInput, answer: Callable[[bool], None]) -> None:
        """Answer at once."""
        answer(False)

    def close(self) -> None:
        """Do nothing."""


class EncoderGate:
    """Lets a request through once each of its contents was found or given up.

    Args:
        is_kept: tells which outputs the engine has itself.
        seconds: for an encoder server to answer; then the engine encodes.
        clock: seconds, never going back.
    """

    status = RequestStatus.WAITING_FOR_ENCODER

    def __init__(
        self,
        outputs: Outputs,
        encoders: Encoders | None,
        is_kept: Callable[[str], bool],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outputs = outputs
        self._encoders = encoders or NoEncoders()
        self._asks = encoders is not None
        self._is_kept = is_kept
        self._seconds = seconds
        self._clock = clock
        self._answers: SimpleQueue[tuple[str, bool]] = SimpleQueue()
        self._asked: dict[str, float] = {}  # digest -> until when
        self._waiting: dict[str, set[str]] = {}  # request -> digests
        self._shown: dict[str, set[str]] = {}  # request -> digests that it has brought
        self._users: Counter[str] = Counter()  # digest -> requests that show it
        self._told: set[str] = set()  # digests that the scheduler counts on
        self._events: list[Encoded] = []

    def admit(self, message: AddRequest) -> bool:
        """Look up the contents of a request; return False if an encoder server was asked for one."""
        contents, wanted = {one.span.digest: one for one in message.media}, set()
        if contents:
            self._shown[message.id] = set(contents)
        for digest, one in contents.items():
            self._users[digest] += 1
            if digest not in self._asked and self._outputs.has(digest):
                self._find(digest)
            elif self._asks and not self._is_kept(digest):
                wanted.add(digest)
                self._ask(one)
        if wanted:
            self._waiting[message.id] = wanted
        return not wanted

    def _find(self, digest: str) -> None:
        """Tell the scheduler of an output, unless it knows."""
        if digest not in self._told:
            self._told.add(digest)
            self._events.append(Encoded(digest))

    def _ask(self, one: MediaInput) -> None:
        digest = one.span.digest
        if digest not in self._asked:
            self._asked[digest] = self._clock() + self._seconds
            self._encoders.ask(one, lambda is_there: self._answers.put((digest, is_there)))

    def collect(self, timeout: float) -> Mapping[str, Refusal | None]:
        """Return the requests of which no content is outstanding any more."""
        answered = {digest for digest, until in self._asked.items() if until < self._clock()}
        for digest, is_there in self._take_answers(timeout if self._asked and not answered else 0.0):
            if digest in self._asked:
                answered.add(digest)
            if is_there and self._users[digest]:
                self._find(digest)
        if not answered:
            return {}
        for digest in answered:
            del self._asked[digest]
        for digests in self._waiting.values():
            digests.difference_update(answered)
        passed = [request_id for request_id, digests in self._waiting.items() if not digests]
        for request_id in passed:
            del self._waiting[request_id]
        return dict.fromkeys(passed)

    def _take_answers(self, timeout: float) -> list[tuple[str, bool]]:
        answers = []
        try:
            if timeout:
                answers.append(self._answers.get(timeout=timeout))
            while True:
                answers.append(self._answers.get_nowait())
        except Empty:
            return answers

    def take_events(self) -> list[Encoded]:
        """Return what the scheduler has to know since the last call."""
        for digest in self._outputs.take_failed():
            self._told.discard(digest)
            self._events.append(Encoded(digest, is_there=False, has_failed=True))
        events, self._events = self._events, []
        return events

    def release(self, request_id: str) -> None:
        """Forget a request that has gone; what was asked for it may still come, for others."""
        self._waiting.pop(request_id, None)
        for digest in sorted(self._shown.pop(request_id, ())):
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                if digest in self._told:
                    self._told.remove(digest)
                    self._events.append(Encoded(digest, is_there=False))

    def close(self) -> None:
        """Ask nothing more, and let go of the store."""
        self._encoders.close()
        self._outputs.close()


class EncoderEvents(EngineExtension):
    """Tells the scheduler, between two steps, what a gate has learned."""

    def __init__(self, gate: EncoderGate) -> None:
        self._gate = gate

    def poll(self, engine: Host) -> Sequence[TokenOutput]:
        """Apply the gate's events."""
        engine.apply_transfer_events(self._gate.take_events())
        return ()
