"""Runs `server.launch.run` as its own process for tests: `python -m tests.serving.server.run_server SPEC_JSON`."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import msgspec

from tests.threats.loop_probe import LoopProbe
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.ipc.topology import EngineSpec
from tokenmill.serving.replicas.starter import ENGINE_MODULE, WORKER_MODULE
from tokenmill.serving.server.process.launch import run
from tokenmill.serving.server.process.screen import StandardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.core.engine_messages import EngineProgress, EngineReady


class Spec(msgspec.Struct):
    engine: EngineConfig
    server: ServerConfig
    engine_module: str = ENGINE_MODULE
    worker_module: str = WORKER_MODULE
    engines: tuple[EngineSpec, ...] = ()
    max_files: tuple[int, int] | None = None  # the soft and the hard limit of descriptors
    max_file_bytes: int | None = None  # what a disk takes of each file
    probe_loop: bool = False  # whether the API process says for how long its loop stands still


class Phases(StandardError):
    """Says what a test waits for."""

    def on_progress(self, progress: EngineProgress) -> None:
        print("PROGRESS", progress.phase, file=sys.stderr, flush=True)

    def on_ready(self, ready: EngineReady, chat: Sequence[tuple[str, str]] = ()) -> None:
        print("READY", ready.model, file=sys.stderr, flush=True)


class ProbedPhases(Phases):
    """Has the loop probed from then on."""

    def on_ready(self, ready: EngineReady, chat: Sequence[tuple[str, str]] = ()) -> None:
        super().on_ready(ready, chat)
        LoopProbe().start()


if __name__ == "__main__":
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    if spec.max_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, spec.max_files)
    if spec.max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec.max_file_bytes, spec.max_file_bytes))
    phases = ProbedPhases if spec.probe_loop else Phases
    sys.exit(run(spec.engine, spec.server, phases, spec.engine_module, spec.engines, spec.worker_module))
