"""The engine process as its parent sees it: signs of life from the start on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import zmq

from tests.checkpoints import make_checkpoint
from tokenmill.config import EngineConfig, ServerConfig
from tokenmill.core.messages import Beat, EngineMessage, EngineProgress, EngineReady, Ping, Pong, ToApi
from tokenmill.engine.process import START_PATIENCE
from tokenmill.ipc.channels import API, Inbox, Outbox, engine_name
from tokenmill.replicas.launch_file import LaunchFile

INDEX = 3
NAME = engine_name(INDEX)


def test_the_engine_beats_while_it_starts_and_answers_pings_when_it_is_ready(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(make_checkpoint(tmp_path / "m")), device="cpu", num_pages=64).resolve()
    LaunchFile(engine, ServerConfig(engine_timeout=7.0)).write(tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToApi] = Inbox(context, tmp_path, API, ToApi)
    outbox = Outbox(context, tmp_path, NAME)

    def messages_until(kind: type) -> list[ToApi]:
        found: list[ToApi] = []
        while not (found and isinstance(found[-1], kind)):
            assert inbox.socket.poll(60_000), found
            if (message := inbox.receive()) is not None:
                found.append(message)
        return found

    command = [sys.executable, "-m", "tokenmill.engine.process", str(tmp_path), str(INDEX), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            start = messages_until(EngineReady)
            assert {message.engine for message in start if isinstance(message, EngineMessage)} == {INDEX}
            phases = {message.phase for message in start if isinstance(message, EngineProgress)}
            beats = [message for message in start if isinstance(message, Beat) and message.job]
            assert beats, "a second or more passes until it is ready"
            for beat in beats:
                assert (beat.part, beat.limit) == (NAME, 7.0 * START_PATIENCE)
                assert beat.job in phases
            outbox.send(Ping())
            assert messages_until(Pong)[-1] == Pong(NAME)
        finally:
            process.kill()
            inbox.close()
            context.destroy(linger=0)
