"""Do jobs where they can do no harm: a process of its own forks for each, with little processor time and memory.

    any thread --(length, input)-----------> process --fork--> child: does the job within the limits, reports
    any thread <--(length, outcome, output)- process <--------

The end of a fork by its own doing is the outcome of the job. What happens to the processes from outside (they
are killed or stopped, or cannot start) is not: the job is tried once more in a fresh process, then it is `Unavailable`.

This is the asking end; `sandbox_process` is the other one. Neither knows what the jobs are.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tokenmill.core.errors import Unavailable
from tokenmill.ipc.python_child import start_python

HEADER = struct.Struct(">IB")
"""Before every input and output: its length in bytes, and an `Outcome` (of an input: 0)."""

# How often it is looked whether a process has been stopped.
LOOK_SECONDS = 0.2
# A process that is neither stopped nor dead but silent, such as one that waits for a disk: so long for its start, and
# so many times the processor time of a job for a busy machine.
_START_SECONDS = 20.0
_PATIENCE = 10.0
_READ_BYTES = 1 << 20


class Limits(msgspec.Struct, frozen=True):
    """Processor time in seconds, and bytes of memory (on Linux only), that one job may take."""

    cpu_seconds: float
    num_bytes: int


class Outcome(enum.IntEnum):
    """The end of a job. LOST: for reasons outside the job."""

    DONE = 0
    REFUSED = 1
    TOO_SLOW = 2
    CRASHED = 3  # as libraries do, too, when memory is short
    LOST = 4


class Reply(NamedTuple):
    """The end of a job, with its output or the sentence of its refusal."""

    outcome: Outcome
    data: bytes


class ProcessLost(Exception):
    """A process of the sandbox has been killed or stopped, or does not answer."""


class Sandbox:
    """Has jobs done, for any number of threads. Starts a process when a job finds none that is idle."""

    def __init__(self, module: str, arguments: Sequence[str], limits: Limits) -> None:
        """`module`: runs as the process, with the limits as JSON and `arguments`; see `run_jobs`."""
        self._command = ["-m", module, msgspec.json.encode(limits).decode(), *arguments]
        self._patience = _START_SECONDS + _PATIENCE * limits.cpu_seconds
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids, those of idle ones first."""
        with self._lock:
            return [process.pid for process in (*self._idle, *self._busy)]

    def ask(self, data: bytes) -> Reply:
        """Have a job done and return its reply, whose outcome is never LOST.

        Raises:
            Unavailable: two processes were lost with it, or none can be started.
        """
        for is_fresh in (False, True):
            with contextlib.suppress(ProcessLost, OSError):
                return self._try(data, is_fresh)
        raise Unavailable("a helper process of the server was lost; try again")

    def close(self) -> None:
        """End all processes; jobs that run end as `Unavailable`."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()  # the thread that waits for it takes it down
        for process in idle:
            process.close()

    def _try(self, data: bytes, is_fresh: bool) -> Reply:
        process = self._take(is_fresh)
        try:
            reply = process.ask(data, self._patience)
            if reply.outcome is Outcome.LOST:
                raise ProcessLost
        except BaseException:
            with self._lock:
                self._busy.remove(process)
            process.close()
            raise
        with self._lock:
            self._busy.remove(process)
            if not self._is_closed:
                self._idle.append(process)
                return reply
        process.close()
        return reply

    def _take(self, is_fresh: bool) -> _Process:
        """Mark a process as busy, an idle one unless `is_fresh`, and put away those that were lost while idle."""
        with self._lock:
            if self._is_closed:
                raise ProcessLost
            lost = [process for process in self._idle if not process.is_well]
            self._idle = [process for process in self._idle if process not in lost]
            process = self._idle.pop() if self._idle and not is_fresh else _Process(self._command)
            self._busy.add(process)
        for one in lost:
            one.close()
        return process


class _Process:
    """One process, for one job at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = start_python(command, stdin=pipe, stdout=pipe, stderr=nothing, bufsize=0)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both were asked for"
        self._stdin, self._stdout = stdin.fileno(), stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self.pid = self._process.pid

    @property
    def is_well(self) -> bool:
        """False once it has ended or been stopped."""
        return self._process.poll() is None and not is_stopped(self.pid)

    def ask(self, data: bytes, patience: float) -> Reply:
        """Hand over an input and return the reply.

        Raises:
            ProcessLost: it has ended or been stopped, or has not answered within `patience` seconds.
        """
        deadline = time.monotonic() + patience
        unsent = memoryview(HEADER.pack(len(data), 0) + data)
        received = bytearray()
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        poll.register(self._stdin, select.POLLOUT)
        while (reply := _whole(received)) is None:
            events = dict(poll.poll(LOOK_SECONDS * 1000))
            if self._stdout in events:
                received += self._read()
            elif unsent and self._stdin in events:
                unsent = unsent[self._write(unsent) :]
                if not unsent:
                    poll.unregister(self._stdin)
            elif is_stopped(self.pid) or time.monotonic() > deadline:
                raise ProcessLost
        return reply

    def kill(self) -> None:
        """End it and its fork, which may be stopped."""
        if self._process.returncode is None:  # once it is waited for, its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and let go of its pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> bytes:
        data = os.read(self._stdout, _READ_BYTES)
        if not data:
            raise ProcessLost
        return data

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._stdin, data)
        except BrokenPipeError:
            raise ProcessLost from None


def is_stopped(child: int) -> bool:
    """Return True if a child of this process has been stopped by a signal; False where this cannot be found out."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # a program that embeds us lets the kernel reap its children
        return False


def _whole(received: bytearray) -> Reply | None:
    """Return the reply, or None until all of it is there."""
    if len(received) < HEADER.size:
        return None
    length, outcome = HEADER.unpack_from(received)
    if len(received) < HEADER.size + length:
        return None
    return Reply(Outcome(outcome), bytes(received[HEADER.size :]))
