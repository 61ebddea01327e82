"""Run the small parent of the API processes: it holds the listening socket and restarts processes that are killed.

    bind ─> fork ─┬─> the first API process starts engines and text workers, and serves
                  ├─> its API workers, if any, serve beside it
                  └─> waits for an end: a process killed after the first has served is forked again; after the first
                      all begin anew, and connections wait in the socket's queue meanwhile; anything else is the end

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
from tokenmill.serving.replicas.restarts import Restarts

Serve = Callable[[int, Path, Callable[[], None]], int]
"""Serves as the API process of this index, with a private folder that all share, until the server ends; returns the
exit code. The first calls its last argument once it has begun."""

_PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM})
# What the API process leaves behind ends by itself within this time, or is killed: it may not be beside its successor.
_ORPHAN_SECONDS = 2.0
_KILLED_SECONDS = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def supervise(serve: Serve, count: int, most: int, say: Callable[[str, str], None]) -> int:
    """Serve in child processes until the first ends, and again when it is killed; return the last exit code.

    Must be called in the main thread, with SIGINT and SIGTERM held back.

    Args:
        count: API processes.
        most: restarts of each within a minute; if it is 0 and `count` is 1, this process itself serves.
        say: called for each death with one word for the process that has died, and a sentence.
    """
    if not most and count == 1:
        with private_folder() as folder:
            return serve(0, folder, lambda: None)
    restarts = Restarts(most)
    has_begun = mmap.mmap(-1, 1)  # shared with the children
    on_begun = partial(has_begun.__setitem__, 0, 1)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with _children_awaited():
        while True:
            has_begun[0] = 0
            with private_folder() as folder:

                def fork(index: int, folder: Path = folder) -> int:
                    return _fork(partial(serve, index, folder, on_begun), folder)

                code = _Processes(fork, lambda: most if has_begun[0] else 0, say).run(count)
                _end_orphans()
            if code >= 0:
                return code
            how = f"the API process was killed by {signal.Signals(-code).name}"
            pause = restarts.died(time.monotonic()) if has_begun[0] else None
            if pause is None:
                say("api", how)
                return 1
            say("api", f"{how}; it is started again")
            time.sleep(pause)


class _Processes:
    """The API processes of one server, as long as its first one lives."""

    def __init__(
        self, fork: Callable[[int], int], restarts: Callable[[], int], say: Callable[[str, str], None]
    ) -> None:
        """
        Args:
            fork: starts the process of an index and returns its process id.
            restarts: returns how often in a minute each API worker may be started again at present.
            say: see `keep`.
        """
        self._fork = fork
        self._restarts = restarts
        self._say = say
        self._index_of: dict[int, int] = {}
        self._deaths: dict[int, Restarts] = {}
        self._due: dict[int, float] = {}  # when API workers that have died are to be started again
        self._failure = 0

    def run(self, count: int) -> int:
        """Pass signals on until the first ends; return its exit code, or minus the signal that killed it."""
        for index in range(count):
            self._start(index)
        while True:
            number = _next_signal(min(self._due.values(), default=None))
            if number in _PASSED_ON:
                self._due.clear()
                self._signal(number)
            for index in [index for index, due in self._due.items() if due <= time.monotonic()]:
                del self._due[index]
                self._start(index)
            # One signal may stand for several ends: of others, whose parent has died, too.
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                index, code = self._index_of.pop(ended[0], -1), os.waitstatus_to_exitcode(ended[1])
                if index == 0:
                    self._signal(signal.SIGKILL if code < 0 else signal.SIGTERM)
                    return self._failure or code
                if index > 0 and code:
                    self._lose(index, code)

    def _start(self, index: int) -> None:
        self._index_of[self._fork(index)] = index

    def _signal(self, number: int) -> None:
        for pid in self._index_of:
            os.kill(pid, number)

    def _lose(self, index: int, code: int) -> None:
        """Schedule the restart of an API worker that has died, or end the server."""
        how = f"API process {index} " + (f"was killed by {signal.Signals(-code).name}" if code < 0 else "has failed")
        deaths = self._deaths.setdefault(index, Restarts(self._restarts()))
        pause = deaths.died(time.monotonic()) if code < 0 else None
        if pause is None:
            self._say(f"api-{index}", how)
            self._failure = 1
            self._signal(signal.SIGTERM)
        else:
            self._say(f"api-{index}", f"{how}; it is started again, and its streams have ended")
            self._due[index] = time.monotonic() + pause


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder of this user alone for sockets, and remove it at the end.

    Raises:
        InvalidConfig: no folder can be made.
    """
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
    """Block SIGCHLD inside, so that `sigwait` returns it when a child ends."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(work: Callable[[], int], folder: Path) -> int:
    """Start a child that ends with the exit code of `work`; return its id. It removes the folder if it is orphaned."""
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


def _next_signal(until: float | None) -> int | None:
    """Wait for a signal to pass on or for the end of a child; return None if the clock reaches `until` first."""
    wanted = _PASSED_ON | {signal.SIGCHLD}
    if until is None:
        return signal.sigwait(wanted)
    come = signal.sigtimedwait(wanted, max(0.0, until - time.monotonic()))
    return None if come is None else come.si_signo


def _end_orphans() -> None:
    """Wait for the children that the API processes have left to this process, and kill those that stay."""
    started = time.monotonic()
    with contextlib.suppress(ChildProcessError):  # it is gone
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
    """Call prctl on Linux; elsewhere a pipe tells a child of its parent's end, and orphans end by themselves."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
