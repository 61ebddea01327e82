"""The engine process as its parent sees it: signs of life from the start on."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.model.kernels.gpu import DEVICE
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.core.engine_messages import EngineProgress, EngineReady
from tokenmill.core.messages import AddRequest, ToApi
from tokenmill.core.part_messages import Beat, EngineMessage, PartFailed, Ping, Pong
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.ipc.channels import API, Inbox, Outbox, engine_name
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.topology import EngineSpec, Topology
from tokenmill.serving.replicas.health import SILENT_START_SECONDS
from tokenmill.startup.assembly.engine_process import START_PATIENCE, EngineLoop, serve

INDEX = 3
NAME = engine_name(INDEX)


def test_the_engine_beats_while_it_starts_and_answers_pings_when_it_is_ready(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(make_checkpoint(tmp_path / "m")), device="cpu", num_pages=64).resolve()
    topology = Topology(tuple(map(EngineSpec, range(INDEX + 1))))
    LaunchFile(engine, ServerConfig(engine_timeout=7.0), topology).write(tmp_path)
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

    command = [sys.executable, "-m", "tokenmill.startup.assembly.engine_process", str(tmp_path), str(INDEX), "0", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            first = messages_until(EngineProgress)
            began = time.monotonic()
            start = first + messages_until(EngineReady)
            seconds = time.monotonic() - began
            assert {message.engine for message in start if isinstance(message, EngineMessage)} == {INDEX}
            phases = {message.phase for message in start if isinstance(message, EngineProgress)}
            beats = [message for message in start if isinstance(message, Beat) and message.job]
            # Every second one, until it is ready; what loads may hold all threads up, and may be felt for a while.
            assert beats or seconds < SILENT_START_SECONDS
            for beat in beats:
                assert (beat.part, beat.limit) == (NAME, 7.0 * START_PATIENCE)
                assert beat.job in phases
            outbox.send(Ping())
            assert messages_until(Pong)[-1] == Pong(NAME)
        finally:
            process.kill()
            inbox.close()
            context.destroy(linger=0)


class DyingPlatform(FakePlatform):
    """Attributes: `is_dead`: every call to the device raises."""

    is_dead = False

    def synchronize(self) -> None:
        if self.is_dead:
            raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.skipif(DEVICE != "cpu", reason="a device that dies is one of the imagination")
def test_a_device_that_dies_in_a_step_ends_the_process_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = DyingPlatform()

    class Dying:
        def forward(self, *_: Any) -> None:
            platform.is_dead = True
            raise RuntimeError("CUDA error: unspecified launch failure")

    def run(loop: EngineLoop) -> None:
        loop._engine.executor._executor.runner.model = Dying()
        run_to_its_end(loop)

    run_to_its_end = EngineLoop.run
    monkeypatch.setattr(EngineLoop, "run", run)
    monkeypatch.setattr("tokenmill.startup.assembly.setup.select_platform", lambda device: platform)
    folder = make_checkpoint(tmp_path / "m")
    engine = EngineConfig(model=str(folder), device="cpu", dtype="float32", num_pages=64, enforce_eager=True)
    engine = dataclasses.replace(engine, max_num_seqs=2, max_num_batched_tokens=8)
    LaunchFile(engine.resolve(), ServerConfig()).write(tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToApi] = Inbox(context, tmp_path, API, ToApi)
    outbox = Outbox(context, tmp_path, engine_name(0))
    outbox.send(AddRequest(id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=2)))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert serve(tmp_path, 0) == 1
        while not isinstance(message := inbox.receive(), PartFailed):
            assert message is not None or inbox.socket.poll(30_000), "it ends without a word"
        assert message.exit_code == 1
        assert "the device has failed and runs no further step: CUDA error" in message.error
    finally:
        signal.signal(signal.SIGTERM, handler)
        inbox.close()
        context.destroy(linger=0)
