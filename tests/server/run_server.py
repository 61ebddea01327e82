"""Runs `server.launch.run` as its own process for tests: `python -m tests.server.run_server SPEC_JSON`."""

import sys

import msgspec

from tokenmill.config import EngineConfig, ServerConfig
from tokenmill.server.launch import ENGINE_MODULE, run


class Spec(msgspec.Struct):
    engine: EngineConfig
    server: ServerConfig
    engine_module: str = ENGINE_MODULE


if __name__ == "__main__":
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    exit_code = run(
        spec.engine,
        spec.server,
        on_progress=lambda progress: print("PROGRESS", progress.phase, file=sys.stderr, flush=True),
        on_ready=lambda ready: print("READY", ready.model, file=sys.stderr, flush=True),
        engine_module=spec.engine_module,
    )
    sys.exit(exit_code)
