"""A text worker: the sockets around `TextProcessor`, as a process or as a thread of the API process.

    python -m tokenmill.frontend.worker FOLDER INDEX

It ends when its standard input does, that is, when its parent is gone.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Container
from pathlib import Path

import zmq

from tokenmill.channels import API, ENGINE, Inbox, LaunchFile, Outbox, worker_name
from tokenmill.errors import TokenMillError
from tokenmill.frontend.slow_lane import SlowLane
from tokenmill.frontend.text_processor import Routed, TextProcessor, load_text_processor
from tokenmill.messages import (
    AbortRequests,
    DecodeTokens,
    EncodeText,
    EngineFailed,
    EngineReady,
    GenerateText,
    ToWorker,
)

# A message of the first size takes some milliseconds, and many may come at once; one of the second takes seconds.
LONG_BYTES = 4 << 10
HUGE_BYTES = 1 << 20


def run_worker(folder: Path, index: int, alive_fd: int) -> int:
    """Serve until `alive_fd` reaches its end; return the exit code.

    The tokenizer is loaded when the engine is ready: only then is it known where a hub model lies. A tokenizer that
    cannot be loaded is reported to the API process as `EngineFailed`.
    """
    launch = LaunchFile.read(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToWorker] = Inbox(context, folder, worker_name(index), ToWorker)
    api, engine = Outbox(context, folder, API), Outbox(context, folder, ENGINE)
    poller = zmq.Poller()
    poller.register(inbox.socket, zmq.POLLIN)
    poller.register(alive_fd, zmq.POLLIN)
    desk: TextDesk | None = None
    try:
        while not _parent_is_gone(alive_fd, events := dict(poller.poll())):
            if desk is not None:
                desk.hush(events)
            while (message := inbox.receive()) is not None:
                if isinstance(message, EngineReady):
                    desk = TextDesk(_load(launch, message, index), api, engine)
                    for fd in desk.fds:
                        poller.register(fd, zmq.POLLIN)
                assert desk is not None, "the API process sends EngineReady before anything else"
                desk.take(message, inbox.num_bytes)
                desk.hand_on_finished()
            if desk is not None:
                desk.hand_on_finished()
        return 0
    except TokenMillError as error:
        api.send(EngineFailed(str(error), error.exit_code))
        return error.exit_code
    finally:
        if desk is not None:
            desk.close()
        inbox.close()
        api.close()
        engine.close()
        context.term()


class TextDesk:
    """Passes messages through a `TextProcessor`, long ones by way of two slow lanes: nothing short waits for them, and
    what is long does not wait for what is huge.

    Attributes:
        fds: one of them becomes readable when `hand_on_finished` has something to do.
    """

    def __init__(self, processor: TextProcessor, api: Outbox, engine: Outbox) -> None:
        self._processor = processor
        self._api = api
        self._engine = engine
        self._long, self._huge = self._lanes = SlowLane(processor.prepare), SlowLane(processor.prepare)
        self.fds = [lane.fd for lane in self._lanes]

    def take(self, message: ToWorker, num_bytes: int) -> None:
        """Handle a message of this size, or let a lane begin with it."""
        if num_bytes > LONG_BYTES and isinstance(message, GenerateText | EncodeText | DecodeTokens):
            (self._huge if num_bytes > HUGE_BYTES else self._long).put(message)
            return
        if isinstance(message, AbortRequests):
            for lane in self._lanes:
                lane.abort(message.ids)
        self._send(self._processor.process(message))

    def hand_on_finished(self) -> None:
        """Send on what the lanes have prepared."""
        for lane in self._lanes:
            for message, prepared, aborted in lane.finished():
                self._send(self._processor.finish(message, prepared))
                if aborted:  # its other continuations are wanted
                    self._send(self._processor.process(AbortRequests(aborted)))

    def hush(self, events: Container[object]) -> None:
        """Of the `fds`, make those wait that are readable; `hand_on_finished` must follow."""
        for lane in self._lanes:
            if lane.fd in events:
                lane.hush()

    def close(self) -> None:
        """Let the lanes end."""
        for lane in self._lanes:
            lane.close()

    def _send(self, routed: Routed) -> None:
        for to_engine in routed.to_engine:
            self._engine.send(to_engine)
        for to_api in routed.to_api:
            self._api.send(to_api)


def _load(launch: LaunchFile, ready: EngineReady, index: int) -> TextProcessor:
    return load_text_processor(Path(ready.model), launch.engine, launch.server.chat_template, index)


def _parent_is_gone(alive_fd: int, events: dict[object, int]) -> bool:
    return alive_fd in events and os.read(alive_fd, 1) == b""


def main() -> int:
    """Entry point of the process."""
    # Ctrl-C in a terminal reaches the whole group; the parent decides when its children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    folder, index = Path(sys.argv[1]), int(sys.argv[2])
    exit_code = run_worker(folder, index, sys.stdin.fileno())
    if exit_code == 0:
        # The parent is gone without having ended us, so it has not removed its folder either.
        shutil.rmtree(folder, ignore_errors=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
