"""Runs `server.launch.run` as its own process for tests: `python -m tests.server.run_server SPEC_JSON`."""

import resource
import sys

import msgspec

from tokenmill.config import EngineConfig, ServerConfig
from tokenmill.replicas.topology import EngineSpec
from tokenmill.server.process.launch import ENGINE_MODULE, run


class Spec(msgspec.Struct):
    engine: EngineConfig
    server: ServerConfig
    engine_module: str = ENGINE_MODULE
    engines: tuple[EngineSpec, ...] = ()
    max_files: tuple[int, int] | None = None  # the soft and the hard limit of descriptors


if __name__ == "__main__":
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    if spec.max_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, spec.max_files)
    exit_code = run(
        spec.engine,
        spec.server,
        on_progress=lambda progress: print("PROGRESS", progress.phase, file=sys.stderr, flush=True),
        on_ready=lambda ready: print("READY", ready.model, file=sys.stderr, flush=True),
        engine_module=spec.engine_module,
        engines=spec.engines,
    )
    sys.exit(exit_code)
