"""Run a server from two configs, and leave nothing behind when it ends.

    take the port -> fork the API processes (`parent`) -> private folder -> start engines and text workers
        -> engines are ready -> tokenizers are loaded -> accept requests
        -> Ctrl-C, SIGTERM or a death too many -> end streams, end children, remove the folder

Whatever ends the server, one sentence says why, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.core.errors import DiskFull, InvalidConfig, TokenMillError
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.standard_streams import lossy
from tokenmill.ipc.topology import EngineSpec, Topology
from tokenmill.serving.observe.event_log import EventLog
from tokenmill.serving.replicas.starter import ENGINE_MODULE, WORKER_MODULE, Starter, import_shared
from tokenmill.serving.server.http.descriptors import raise_limit
from tokenmill.serving.server.http.listener import bind, check_tls, url
from tokenmill.serving.server.http.shared_listener import ConnectionCounts, SharedListener
from tokenmill.serving.server.process.parent import supervise
from tokenmill.serving.server.process.screen import OpenScreen, StandardError
from tokenmill.serving.server.process.stop_signals import held_back

Announce = Callable[[ServerConfig, str], contextlib.AbstractContextManager[None]]


def run(
    engine: EngineConfig,
    server: ServerConfig,
    open_screen: OpenScreen = StandardError,
    engine_module: str = ENGINE_MODULE,
    engines: tuple[EngineSpec, ...] = (),
    worker_module: str = WORKER_MODULE,
    announce: Announce | None = None,
) -> int:
    """Serve until stopped; return the exit code. Must be called in the main thread.

    Args:
        open_screen: opens the screen that shows the start and the life of the server, in each process that shows it.
        engine_module, worker_module: the modules that run as the process of an engine and of a text worker.
        engines: the engines to start; empty: as many as `--data-parallel-size` says, each of as many
            ranks as `--tensor-parallel-size` and `--pipeline-parallel-size` say.
        announce: entered once the address is bound, with the server's config, whose port is now known, and its URL.
    """
    with lossy("stdout", "stderr"):
        starter = partial(Starter, engine_module, worker_module)
        return _run(engine, server, open_screen, starter, engines, announce or _unannounced)


def run_watched(
    engine: EngineConfig, server: ServerConfig, open_screen: OpenScreen, folder: Path, starter: Starter
) -> int:
    """Serve in this process, which another one watches and starts again; return the exit code.

    Args:
        folder: private to this server. starter: may have started the engine already; see `Starter.start_spare`.
    """
    with lossy("stdout", "stderr"):
        try:
            launch = prepared(engine, server)
            raise_limit()
            with held_back(), _listener(launch.server) as listener, weight_memory() as memory:
                return _serve_first(folder, launch, memory, listener, open_screen, lambda: None, starter)
        except TokenMillError as error:
            return _refuse(open_screen, error)


def _serve_first(
    folder: Path,
    launch: LaunchFile,
    memory: str,
    door: socket.socket,
    open_screen: OpenScreen,
    on_begun: Callable[[], None],
    starter: Starter,
) -> int:
    """Serve as the first API process, whose engines keep their weights in `memory`."""
    shared = LaunchFile(replace(launch.engine, weight_memory=memory), launch.server, launch.topology)
    try:
        shared.write(folder)
    except DiskFull as error:
        return _refuse(open_screen, error)
    with starter.begun(folder, shared.topology):
        from tokenmill.serving.server.process import first_process

        return first_process.serve(folder, shared, door, open_screen, on_begun, starter)


def _run(
    engine: EngineConfig,
    server: ServerConfig,
    open_screen: OpenScreen,
    make_starter: Callable[[], Starter],
    engines: tuple[EngineSpec, ...],
    announce: Announce,
) -> int:
    try:
        launch = prepared(engine, server, engines)
        server = launch.server
        check_tls(server)
        raise_limit()

        def serve(index: int, folder: Path, on_begun: Callable[[], None]) -> int:
            door = listener if counts is None else SharedListener(listener, counts, index)
            # What both import, they import here and not above: the parent stays small, without threads when it forks.
            if index:
                from tokenmill.serving.server.api_worker import process

                return process.serve(folder, launch, door, index)
            return _serve_first(folder, launch, memory, door, open_screen, on_begun, make_starter())

        def note_death(part: str, text: str) -> None:
            log.note("death", text, part=part)

        counts = ConnectionCounts(server.api_server_count) if server.api_server_count > 1 else None
        log = EventLog(StandardError().on_line, server.log_format == "json")
        import_shared()
        with held_back(), _listener(server) as listener, weight_memory() as memory:
            server = _bound(server, listener)
            with announce(server, url(server, listener)):
                return supervise(serve, server.api_server_count, server.max_restarts, note_death)
    except TokenMillError as error:
        return _refuse(open_screen, error)


@contextmanager
def _unannounced(_server: ServerConfig, _url: str) -> Iterator[None]:
    yield


def _bound(server: ServerConfig, listener: socket.socket) -> ServerConfig:
    """Return the config with the port that the system has chosen, where it was asked to choose one."""
    if server.uds is not None or server.port:
        return server
    return replace(server, port=listener.getsockname()[1])


def _refuse(open_screen: OpenScreen, error: TokenMillError) -> int:
    with open_screen() as screen:
        screen.on_error(str(error))
    return error.exit_code


def prepared(engine: EngineConfig, server: ServerConfig, engines: tuple[EngineSpec, ...] = ()) -> LaunchFile:
    """Return the launch file of a server: its configs with model, names and defaults filled in.

    Raises:
        InvalidConfig: several engines would share one GPU.
    """
    engine, server = _with_names(engine, server)
    engine, server = engine.resolve(), server.resolve()
    num_ranks = engine.num_ranks_here
    engines = engines or tuple(EngineSpec(index, num_ranks) for index in range(server.data_parallel_size))
    topology = Topology(engines, server.tokenizer_workers, server.api_server_count)
    if topology.has_replicas and engine.device.startswith("cuda:"):
        raise InvalidConfig(f"--device {engine.device} is one GPU, and each engine takes its own: use --device cuda")
    return LaunchFile(engine, server, topology)


@contextlib.contextmanager
def _listener(server: ServerConfig) -> Iterator[socket.socket]:
    with bind(server) as listener:
        try:
            yield listener
        finally:
            if server.uds is not None:
                Path(server.uds).unlink(missing_ok=True)


def served_names(engine: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """Return the model's ids in the API: those given, else the name of its folder or GGUF file, else the hub id."""
    if server.served_model_name:
        return server.served_model_name
    if engine.model in ("", str(_demo_model())):
        return ("tokenmill-demo",)
    folder = Path(engine.model)
    if folder.is_file():
        return (folder.stem,)
    return (folder.resolve().name if folder.is_dir() else engine.model,)


def _with_names(engine: EngineConfig, server: ServerConfig) -> tuple[EngineConfig, ServerConfig]:
    """Fill in the demo model if no model is given, and the name under which the model is served."""
    server = replace(server, served_model_name=served_names(engine, server))
    return (engine if engine.model else replace(engine, model=str(_demo_model()))), server


def _demo_model() -> Path:
    from tokenmill.demo import demo_model_path

    return demo_model_path()


@contextmanager
def weight_memory() -> Iterator[str]:
    """Yield the path of an unnamed memory file that child processes can open; it takes no memory while empty.

    Yield "" on systems without such files. This process holds the file, so a restarted engine finds the weights.
    """
    if not hasattr(os, "memfd_create"):
        yield ""
        return
    descriptor = os.memfd_create("tokenmill-weights")
    try:
        os.fchmod(descriptor, 0o600)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
