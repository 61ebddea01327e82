"""The process of a sandbox: forks for every job, watches the fork, reports its outcome. See `sandbox`.

It ends when its standard input does, that is, when its parent is gone, and takes a fork that runs with it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO, NoReturn

from tokenmill.core.errors import InvalidRequest
from tokenmill.ipc.sandbox import HEADER, LOOK_SECONDS, Limits, Outcome, Reply, is_stopped

Job = Callable[[bytes], bytes]
# Nothing that a job does sends these, unlike those of a crash: they come from outside, as where memory runs out.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_STDIN, _STDOUT = 0, 1


def run_jobs(job: Job, load: Callable[[], None], limits: Limits) -> None:
    """Do jobs until standard input ends.

    Args:
        job: input to output, in a fork; raises InvalidRequest to refuse.
        load: run before each fork, so that forks find what they need; InvalidRequest refuses the job, any other
            error ends the process.
    """
    with open(_STDIN, "rb", closefd=False) as requests, open(_STDOUT, "wb", closefd=False) as replies:
        while (data := _read(requests)) is not None:
            try:
                load()
                reply = _in_fork(job, data, limits)
            except InvalidRequest as error:
                reply = Reply(Outcome.REFUSED, str(error).encode())
            replies.write(HEADER.pack(len(reply.data), reply.outcome))
            replies.write(reply.data)
            replies.flush()


def address_space() -> int:
    """Return the bytes of address space that this process has; 0 where that is unknown."""
    return _memory_pages()[0] * resource.getpagesize()


def own_memory() -> int:
    """Return the bytes of this process that are resident and not of a file; 0 where that is unknown."""
    _, resident, shared = _memory_pages()
    return (resident - shared) * resource.getpagesize()


def _memory_pages() -> tuple[int, int, int]:
    if sys.platform != "linux":
        return 0, 0, 0
    with open("/proc/self/statm", encoding="ascii") as file:
        size, resident, shared = map(int, file.read().split()[:3])
    return size, resident, shared


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, _ = HEADER.unpack(header)
    data = stream.read(length)
    return data if len(data) == length else None


def _in_fork(job: Job, data: bytes, limits: Limits) -> Reply:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _work_and_exit(job, data, limits, write_end)
    os.close(write_end)
    with open(read_end, "rb", buffering=0) as pipe:
        report = _report(pipe.fileno(), child)
    _, status = os.waitpid(child, 0)
    return _outcome(report, status)


def _report(pipe: int, child: int) -> bytes:
    """Return all that a fork writes before it ends. Kill the fork if it is stopped, or if standard input ends."""
    report = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(_STDIN, select.POLLIN)
    while True:
        events = dict(poll.poll(LOOK_SECONDS * 1000))
        if pipe in events:
            part = os.read(pipe, 1 << 20)
            if not part:
                return bytes(report)
            report += part
        elif events:  # the next input never comes before this reply: standard input has ended
            os.kill(child, signal.SIGKILL)
            sys.exit(0)
        elif is_stopped(child):
            os.kill(child, signal.SIGKILL)


def _outcome(report: bytes, status: int) -> Reply:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGPROF:
            return Reply(Outcome.TOO_SLOW, b"")
        return Reply(Outcome.LOST if number in _FROM_OUTSIDE else Outcome.CRASHED, b"")
    if status or not report:
        return Reply(Outcome.CRASHED, b"")
    return Reply(Outcome(report[0]), report[1:])


def _work_and_exit(job: Job, data: bytes, limits: Limits, write_end: int) -> NoReturn:
    """Do the job of a fork, report, and end without Python's own clean-up, which belongs to the parent."""
    exit_code = 1
    with contextlib.suppress(BaseException):
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (_STDIN, _STDOUT):  # whatever takes over the job cannot answer for others
            os.dup2(nothing, descriptor)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":  # elsewhere the limit is not kept, and time alone bounds a job
            room, hard = address_space() + limits.num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]
            room = room if hard == resource.RLIM_INFINITY else min(room, hard)
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        try:
            outcome, output = Outcome.DONE, job(data)
        except InvalidRequest as error:
            outcome, output = Outcome.REFUSED, str(error).encode()
        with open(write_end, "wb") as pipe:
            pipe.write(bytes([outcome]))
            pipe.write(output)
        exit_code = 0
    os._exit(exit_code)
