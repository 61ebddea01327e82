"""Find this user's running servers, and start one in the background, for `run`, `ps` and `stop`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tokenmill.config.model_files import check_model
from tokenmill.core.errors import InvalidCheckpoint, TokenMillError
from tokenmill.ipc.python_child import start_python
from tokenmill.ipc.server_registry import (
    RunningServer,
    forget_logs,
    is_running,
    running_servers,
    runtime_folder,
)

if TYPE_CHECKING:
    from tokenmill.llm.remote import RemoteModel

DEMO = "tokenmill-demo"
LOG_NAME = "server-{}.log"
LOG_SECONDS = 7 * 86400.0
LOOK_SECONDS = 0.1


class ServerEnded(TokenMillError):
    """A server that was started in the background ended before it was ready."""


def servers_folder() -> Path:
    """Return the folder in which running servers of this user have their files; see `server_registry`."""
    return runtime_folder(os.environ.get("XDG_RUNTIME_DIR"))


def check_model_is_there(model: str, load_format: str = "auto") -> None:
    """Refuse a model that is nowhere before anything large is imported; drawn weights (`dummy`) need no files.

    Raises:
        InvalidCheckpoint: naming it.
    """
    if not model:
        return
    try:
        check_model(model, needs_weights=load_format != "dummy")
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{model}: {error}") from error


def absolute_source(model: str) -> str:
    """Return a model as other commands can compare it: the real path where there is one, else the name."""
    place = Path(model).expanduser()
    return str(place.resolve()) if model and place.exists() else model


def model_at(server: RemoteModel, model: str) -> str | None:
    """Return the name that a server has for a model; None: it does not serve it.

    Raises:
        TokenMillError: it does not answer.
    """
    names = [str(entry["id"]) for entry in json.loads(server.read("/v1/models"))["data"]]
    # A folder is served by its name, a file by its name without the ending.
    wanted = (model, Path(model).name, Path(model).stem) if Path(model).expanduser().exists() else (model,)
    return next((name for name in names if name in wanted), None)


def find_entry(entries: Sequence[RunningServer], model: str) -> RunningServer | None:
    """Return the server of a model: that of the same folder or hub id, else one whose API has the name."""
    source = absolute_source(model)
    # A server of many models has no source either.
    by_source = [entry for entry in entries if entry.source == source and (source or DEMO in entry.models)]
    if by_source:
        return by_source[0]
    if Path(model).expanduser().exists():  # another folder may have the same name
        return None
    return next((entry for entry in entries if model in entry.models), None)


def find_by_asking(
    entries: Sequence[RunningServer], model: str, key: str | None, cacert: str | None
) -> tuple[RunningServer, str] | None:
    """Return the server, and its name for the model, that lists the model at /v1/models; None: no server does.

    A folder that is there is looked for only where a server's models come from a folder around it: another folder may
    have the same name.
    """
    place = Path(model).expanduser()
    for entry in entries:
        is_around = bool(entry.source) and place.resolve().is_relative_to(entry.source)
        if not model or not is_ready(entry) or (place.exists() and not is_around):
            continue
        with contextlib.suppress(TokenMillError, KeyError, ValueError):
            if name := model_at(reach(entry, key, None, cacert), model):
                return entry, name
    return None


def start_server(model: str, flags: Sequence[str], ttl: float, say: IO[str]) -> RunningServer:
    """Start a server in the background that goes on when this command ends; return it once it answers.

    Args:
        flags: further flags of `serve`.
        ttl: seconds without a request after which it ends; 0: never.
        say: gets the phases of the start.

    Raises:
        ServerEnded: it could not start; the sentence is its own.
    """
    folder = servers_folder()
    forget_logs(folder, LOG_SECONDS)
    log = folder / LOG_NAME.format(os.getpid())
    words = ["-m", "tokenmill", "serve", *([model] if model else []), "--port", "0", "--ttl", f"{ttl:g}", *flags]
    with log.open("wb") as output:
        child = start_python(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    print(f"starting a server of {model or 'the demo model'} in the background; its log: {log}", file=say)
    with log.open(encoding="utf-8", errors="replace") as lines:
        while child.poll() is None:
            _tell(lines, say)
            entry = next((one for one in running_servers(folder) if one.pid == child.pid), None)
            if entry is not None and is_ready(entry):
                child.returncode = 0  # it is nobody's child from here on
                return entry
            time.sleep(LOOK_SECONDS)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    why = next((line.removeprefix("tokenmill: ") for line in reversed(said) if line.startswith("tokenmill: ")), "")
    raise ServerEnded(why or f"the server ended with code {child.returncode}; see {log}")


def wait_until_ready(entry: RunningServer) -> None:
    """Wait for a server that somebody else has started, however long its model takes to load.

    Raises:
        ServerEnded: it ended before it was ready.
    """
    while not is_ready(entry):
        if not is_running(entry):
            raise ServerEnded(f"the server of {entry.models[0]} at {entry.url} ended before it was ready; run it again")
        time.sleep(LOOK_SECONDS)


def is_ready(entry: RunningServer) -> bool:
    """Return True once a server takes connections, which it refuses until its model is loaded."""
    import socket
    from urllib.parse import urlsplit

    parts = urlsplit(entry.url)
    is_unix = parts.scheme.endswith("+unix")
    address: str | tuple[str, int] = parts.path if is_unix else (parts.hostname or "", parts.port or 0)
    with contextlib.suppress(OSError), socket.socket(_family(is_unix, parts.hostname)) as probe:
        probe.settimeout(1)
        probe.connect(address)
        return True
    return False


def _family(is_unix: bool, host: str | None) -> int:
    import socket

    if is_unix:
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in (host or "") else socket.AF_INET


def reach(entry: RunningServer, key: str | None, model: str | None = None, cacert: str | None = None) -> RemoteModel:
    """Connect to a server."""
    from tokenmill.llm.remote import RemoteModel

    return RemoteModel(entry.url, key, model, cacert)


def _tell(lines: IO[str], say: IO[str]) -> None:
    """Pass on the phases that the log of a start has by now."""
    for line in _whole_lines(lines):
        if line.endswith(" ..."):
            print(f"  {line}", file=say, flush=True)


def _whole_lines(lines: IO[str]) -> Iterator[str]:
    while line := lines.readline():
        yield line.rstrip("\n")


def note_ignored(flags: Sequence[str]) -> None:
    """Say that flags of `serve` have no effect on a server that runs already."""
    if flags:
        print(f"a server runs already, so these flags change nothing: {' '.join(flags)}", file=sys.stderr)
