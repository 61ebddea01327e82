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
from pathlib import Path

import zmq

from tokenmill.channels import API, ENGINE, Inbox, LaunchFile, Outbox, worker_name
from tokenmill.errors import TokenMillError
from tokenmill.frontend.text_processor import TextProcessor, load_text_processor
from tokenmill.messages import EngineFailed, EngineReady, ToWorker


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
    processor: TextProcessor | None = None
    try:
        while not _parent_is_gone(alive_fd, dict(poller.poll())):
            while (message := inbox.receive()) is not None:
                if isinstance(message, EngineReady):
                    processor = _load(launch, message, index)
                assert processor is not None, "the API process sends EngineReady before anything else"
                routed = processor.process(message)
                for to_engine in routed.to_engine:
                    engine.send(to_engine)
                for to_api in routed.to_api:
                    api.send(to_api)
        return 0
    except TokenMillError as error:
        api.send(EngineFailed(str(error), error.exit_code))
        return error.exit_code
    finally:
        inbox.close()
        api.close()
        engine.close()
        context.term()


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
