"""The small parent of the API process: it holds the listening socket, and starts that process again when it is killed.

    bind ─> fork ─┬─> the API process starts engines and text workers, and serves
                  └─> waits for its end: killed after it has served, it is forked again, and connections wait in the
                      socket's queue meanwhile; anything else is the end

It forks before there are threads and before anything large is loaded, and passes on the signals that stop a server.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tokenmill.core.errors import InvalidConfig
from tokenmill.replicas.restarts import Restarts

Serve = Callable[[Path, Callable[[], None]], int]
"""Serves, with a private folder, until the server ends; returns the exit code. Calls its argument once it has begun."""

_PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM})
# What the API process leaves behind ends by itself within this time, or is killed: it may not be beside its successor.
_ORPHAN_SECONDS = 2.0
_KILLED_SECONDS = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def keep(serve: Serve, most: int, say: Callable[[str], None]) -> int:
    """Serve in a child process until it ends, and again when it is killed; return the last exit code.

    Must be called in the main thread, with SIGINT and SIGTERM held back.

    Args:
        most: restarts within a minute; 0: serve in this process.
        say: told of a death.
    """
    if not most:
        with _private_folder() as folder:
            return serve(folder, lambda: None)
    restarts = Restarts(most)
    has_begun = mmap.mmap(-1, 1)  # shared with the child
    on_begun = partial(has_begun.__setitem__, 0, 1)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with _children_awaited():
        while True:
            has_begun[0] = 0
            with _private_folder() as folder:
                code = _end_of(_fork(partial(serve, folder, on_begun), folder))
                _end_orphans()
            if code >= 0:
                return code
            how = f"the API process was killed by {signal.Signals(-code).name}"
            pause = restarts.died(time.monotonic()) if has_begun[0] else None
            if pause is None:
                say(how)
                return 1
            say(f"{how}; it is started again")
            time.sleep(pause)


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


@contextlib.contextmanager
def _children_awaited() -> Iterator[None]:
    """Inside, the end of a child is a signal that `sigwait` brings."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(work: Callable[[], int], folder: Path) -> int:
    """A child process that ends with the exit code of `work`; its id. Without a parent it removes the folder itself."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # Ctrl-C in a terminal reaches a whole group: alone in its own, it hears of each signal once, from the parent.
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if os.getppid() == parent:
            code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)


def _end_of(pid: int) -> int:
    """Pass signals on until this child has ended; its exit code, or minus the signal that killed it."""
    while True:
        number = signal.sigwait(_PASSED_ON | {signal.SIGCHLD})
        if number in _PASSED_ON:
            os.kill(pid, number)
            continue
        # One signal may stand for several ends: of others, whose parent has died, too.
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                return os.waitstatus_to_exitcode(ended[1])


def _end_orphans() -> None:
    """Wait for what the API process has left, which has become children of this process, and end what stays."""
    started = time.monotonic()
    with contextlib.suppress(ChildProcessError):  # there is none any more
        while (passed := time.monotonic() - started) < _ORPHAN_SECONDS + _KILLED_SECONDS:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            if passed > _ORPHAN_SECONDS:
                for pid in _children():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _children() -> list[int]:
    # Only this thread has any.
    return [int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]


def _prctl(option: int, value: int) -> None:
    """Linux alone has it; elsewhere nobody is told of a parent's end but by a pipe, and orphans end by themselves."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
