"""The stacks of another process's threads: it writes them to a file of the private folder when a signal asks for them.

The handler is faulthandler's, which needs no interpreter: it works while something holds the interpreter's lock, and
not while the process is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import tempfile
from pathlib import Path

_SIGNAL = signal.SIGUSR1
_MOST_BYTES = 64 << 10
_PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.05


def stack_file(folder: Path, part: str) -> Path:
    """Where a process of this name writes its stacks."""
    return folder / f"{part}.stacks"


def offer_stacks(path: Path) -> None:
    """Write this process's stacks to `path` whenever somebody asks."""
    partial = path.with_suffix(".partial")
    faulthandler.register(_SIGNAL, partial.open("ab"), all_threads=True)
    # Only now: the signal ends a process that does not expect it, so nobody may send it before the file is there.
    partial.rename(path)


async def ask_for_stacks(path: Path, pid: int) -> str:
    """The stacks of a process that offers them at `path`, or a sentence that says why there are none."""
    if not path.exists():
        return "it cannot show its stack yet"
    start = end = path.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, _SIGNAL)
    for _ in range(round(_PATIENCE_SECONDS / _LOOK_SECONDS)):
        await asyncio.sleep(_LOOK_SECONDS)
        size = path.stat().st_size
        if size > start and size == end:
            break
        end = size
    with path.open("rb") as file:
        file.seek(start)
        stacks = file.read(_MOST_BYTES).decode(errors="replace").strip()
    if stacks:
        return stacks
    if _is_stopped(pid):
        return f"it has been stopped by a signal and cannot show its stack; kill -CONT {pid} lets it go on"
    return "it does not show its stack"


def own_stacks() -> str:
    """The stacks of this process's threads."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_MOST_BYTES).decode(errors="replace").strip()


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "\nState:\tT" in status
