"""`run`: from two configs to a serving process, and back to nothing.

    take the port -> private folder -> start engines and text workers -> engines are ready -> tokenizers are loaded
        -> accept requests -> Ctrl-C, SIGTERM or a dead child -> end streams, end children, remove the folder

Whatever ends the server, one sentence says why, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tokenmill.config import EngineConfig, ServerConfig
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.messages import EngineProgress, EngineReady
from tokenmill.ipc.log_lines import LineHandler
from tokenmill.replicas.launch_file import LaunchFile
from tokenmill.replicas.topology import EngineSpec, Topology
from tokenmill.server.http.descriptors import raise_limit
from tokenmill.server.http.listener import bind, check_tls
from tokenmill.server.process.api_process import ApiProcess, Events
from tokenmill.server.process.start_checks import check_sockets, check_start
from tokenmill.server.process.stop_signals import held_back

try:
    from uvloop import run as run_loop
except ImportError:  # it has no build for every platform
    from asyncio import run as run_loop

ENGINE_MODULE = "tokenmill.engine.process"


def run(
    engine: EngineConfig,
    server: ServerConfig,
    on_progress: Callable[[EngineProgress], None] | None = None,
    on_ready: Callable[[EngineReady], None] | None = None,
    on_error: Callable[[str], None] | None = None,
    on_line: Callable[[str], None] | None = None,
    engine_module: str = ENGINE_MODULE,
    engines: tuple[EngineSpec, ...] = (),
) -> int:
    """Serve until stopped; return the exit code. Must be called in the main thread.

    Args:
        on_progress: told of each phase of the start.
        on_ready: told when the server accepts requests.
        on_error: told the one sentence that explains an exit code other than 0; default: standard error.
        on_line: given what children write to standard error; default: standard error.
        engine_module: the module that runs as the process of an engine.
        engines: which engines to start; none: as many as `--data-parallel-size` says, of one rank.
    """
    events = Events(
        progress=on_progress or (lambda _: None),
        ready=on_ready or (lambda _: None),
        error=on_error or _to_stderr,
        line=on_line or _to_stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger().addHandler(LineHandler(write=events.line))
    try:
        engine, server = _with_names(engine, server)
        engine, server = engine.resolve(), server.resolve()
        check_tls(server)
        raise_limit()
        engines = engines or tuple(map(EngineSpec, range(server.data_parallel_size)))
        topology = Topology(engines, server.tokenizer_workers)
        if topology.has_replicas and engine.device.startswith("cuda:"):
            raise InvalidConfig(
                f"--device {engine.device} is one GPU, and each engine takes its own: use --device cuda"
            )
        check_start(server, topology)
        with held_back(), _listener(server) as listener, _private_folder() as folder:
            check_sockets(folder, topology)
            launch = LaunchFile(engine, server, topology)
            # The children have no use for the keys.
            LaunchFile(engine, replace(server, api_key=()), topology).write(folder)

            async def supervise() -> int:
                return await ApiProcess(folder, launch, listener, events, engine_module).run()

            exit_code: int = run_loop(supervise())
            return exit_code
    except TokenMillError as error:
        events.error(str(error))
        return error.exit_code


@contextlib.contextmanager
def _listener(server: ServerConfig) -> Iterator[socket.socket]:
    with bind(server) as listener:
        try:
            yield listener
        finally:
            if server.uds is not None:
                Path(server.uds).unlink(missing_ok=True)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))
    except OSError as error:
        raise InvalidConfig(f"no folder can be made for the sockets, set TMPDIR: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def served_names(engine: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """The model's ids in the API: as told, else the folder's name, else the hub id."""
    if server.served_model_name:
        return server.served_model_name
    if engine.model in ("", str(_demo_model())):
        return ("tokenmill-demo",)
    folder = Path(engine.model)
    return (folder.resolve().name if folder.is_dir() else engine.model,)


def _with_names(engine: EngineConfig, server: ServerConfig) -> tuple[EngineConfig, ServerConfig]:
    """Fill in the demo model where none is given, and the name under which the model is served."""
    server = replace(server, served_model_name=served_names(engine, server))
    if engine.model in ("", str(_demo_model())):
        server = _knowing_demo_model(server)
    return (engine if engine.model else replace(engine, model=str(_demo_model()))), server


def _knowing_demo_model(server: ServerConfig) -> ServerConfig:
    """How the demo model writes calls and marks its thinking, where nothing else is said."""
    finds_calls = server.enable_auto_tool_choice
    return replace(
        server,
        tool_call_parser=server.tool_call_parser or "hermes",
        enable_auto_tool_choice=True if finds_calls is None else finds_calls,
        reasoning_parser=server.reasoning_parser or "qwen3",
    )


def _demo_model() -> Path:
    from tokenmill.demo import demo_model_path

    return demo_model_path()


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
