"""Start and watch the child processes of a server: engines and text workers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tokenmill.ipc.log_lines import escaped
from tokenmill.ipc.stack_dump import ask_for_stacks, own_stacks

RunWorker = Callable[[Path, int, int], object]
"""The loop of a text worker: with the private folder, its index, and what it reads the end of when it should end."""

_LINES_KEPT = 5
_TERMINATE_SECONDS = 0.3
# An engine that keeps KV on a disk: as long as that may take (`CLOSE_SECONDS` of its tier), and some more.
_STORE_SECONDS = 6.0
_LAST_WORD_SECONDS = 5.0


class Child(Protocol):
    """A part that should live as long as the server."""

    name: str

    async def ended(self) -> str:
        """Wait for its end; return a sentence that says how it ended."""
        ...

    async def stop(self) -> None:
        """End it, by force if necessary."""
        ...

    def kill(self, by: str) -> None:
        """End it at once, if possible. `by`: who ends it and why, for the sentence about its end."""

    async def stacks(self) -> str:
        """Return the stacks of its threads, or the reason why there are none."""
        ...


class ChildProcess:
    """A Python module that runs as a process.

    Its standard input is a pipe that this process holds: if this process dies, the child reads the end of the pipe and
    ends too. Its output appears here line by line, and the last lines are kept for the message about its end.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        on_line: Callable[[str], None],
        stacks: Path,
        work: Callable[[], str] = str,
        patience: float = _TERMINATE_SECONDS,
    ) -> None:
        """
        Args:
            process: the process, with pipes for its output and its standard input; see `Starter`.
            stacks: see `stack_file`.
            work: returns its work at its end, as the rest of a sentence.
            patience: seconds that it has for its end.
        """
        self.name = name
        self.process = process
        self._stacks = stacks
        self._work = work
        self._patience = patience
        self._killed_by = ""
        self._on_line = on_line
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._wait, name=f"wait-for-{name}", daemon=True).start()
        self._reader = asyncio.ensure_future(self._read_lines())

    async def ended(self) -> str:
        """Wait for its end; return a sentence with the cause, its work and its last lines."""
        code = await asyncio.shield(self._code)
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._reader), timeout=0.5)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            memory = ", as the system does when its memory has run out"
            how = f"was killed by {self._killed_by}" if self._killed_by else how + memory
        how += self._work()
        lines = "".join(f"\n  | {line}" for line in self._last_lines)
        return f"the {self.name} process {how}" + (f"; its last lines:{lines}" if lines else "")

    async def stop(self) -> None:
        """Terminate the process, and kill it if it does not end in time."""
        if not self._code.done():
            self.process.terminate()
            try:
                await asyncio.wait_for(asyncio.shield(self._code), timeout=self._patience)
            except TimeoutError:
                self.kill("the server, which ends it")
                await self._code
        self._reader.cancel()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self, by: str) -> None:
        """Kill the process; the first `by` names the killer."""
        self._killed_by = self._killed_by or by
        self.process.kill()

    async def stacks(self) -> str:
        """Ask the process for its stacks."""
        return await ask_for_stacks(self._stacks, self.process.pid)

    def _wait(self) -> None:
        # A thread tells of an end on every system, and before the loop has begun to watch.
        code = self.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._code.set_result, code)

    async def _read_lines(self) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self.process.stdout
        )
        try:
            while raw := await _read_line(stream):
                line = raw.decode("utf-8", "replace").rstrip()
                if line:
                    self._last_lines.append(escaped(line))
                    self._on_line(f"[{self.name}] {escaped(line)}")
        finally:
            transport.close()


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, or the available part of an overlong one; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


class WorkerThread:
    """A text worker in a thread of this process (`--tokenizer-workers 0`), with the same code and sockets."""

    def __init__(self, folder: Path, run_worker: RunWorker) -> None:
        self.name = "text worker thread"
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._alive_reader, self._alive_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(folder, run_worker), name="text-worker", daemon=True)
        self._thread.start()

    async def ended(self) -> str:
        """Wait for the end of the thread; return a sentence that says how it ended."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Close the thread's pipe, and wait up to a second for its end."""
        if self._alive_writer >= 0:
            os.close(self._alive_writer)
            self._alive_writer = -1
            await asyncio.to_thread(self._thread.join, 1.0)

    def kill(self, by: str) -> None:
        """Do nothing: a thread cannot be killed."""

    async def stacks(self) -> str:
        """Return the stacks of this process."""
        return own_stacks()

    def _run(self, folder: Path, run_worker: RunWorker) -> None:
        outcome = "the text worker thread ended"
        try:
            run_worker(folder, 0, self._alive_reader)
        except Exception as error:
            outcome = f"the text worker thread failed: {error!r}"
        finally:
            os.close(self._alive_reader)
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._set_ended, outcome)

    def _set_ended(self, outcome: str) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)


def patience(kv_disk: str | None) -> float:
    """Return the seconds that an engine has for its end: what it writes to a disk may take some."""
    return _TERMINATE_SECONDS if kv_disk is None else _STORE_SECONDS


async def end_of(child: Child) -> None:
    """Wait some seconds for the end of a child, and for what it sends before."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.ended(), timeout=_LAST_WORD_SECONDS)
    await asyncio.sleep(0.1)
