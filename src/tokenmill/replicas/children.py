"""The processes that a server starts and watches: engines and text workers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tokenmill.ipc.log_lines import escaped
from tokenmill.ipc.stack_dump import ask_for_stacks, own_stacks

RunWorker = Callable[[Path, int, int], object]
"""The loop of a text worker: with the private folder, its index, and what it reads the end of when it should end."""

_LINES_KEPT = 5
_TERMINATE_SECONDS = 0.3


class Child(Protocol):
    """Something that should live as long as the server."""

    name: str

    async def ended(self) -> str:
        """Return when it has ended, with a sentence that says how."""
        ...

    async def stop(self) -> None:
        """End it, by force if need be."""
        ...

    async def stacks(self) -> str:
        """What its threads are doing, or why that cannot be told."""
        ...


class ChildProcess:
    """A Python module running as a process.

    Its standard input is a pipe that this process holds: should this process vanish, the child reads the end of the
    pipe and ends too. What it writes to standard error appears here, and the last lines are kept for the message about
    its end.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, on_line: Callable[[str], None], stacks: Path
    ) -> None:
        """`stacks`: see `stack_file`."""
        self.name = name
        self.process = process
        self._stacks = stacks
        self._on_line = on_line
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        self._reader = asyncio.ensure_future(self._read_lines())

    @classmethod
    async def start(
        cls, name: str, module: str, arguments: Sequence[str], on_line: Callable[[str], None], stacks: Path
    ) -> ChildProcess:
        """Start `python -m module arguments`, in a session of its own so that Ctrl-C reaches only this process."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a torch.py in the current folder must not be what `import torch` finds
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # The engine shares the cores with the other processes. Threads that spin while they wait for the next
            # matrix product take those away: on 2 busy cores a step was 27 times slower.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            start_new_session=True,
        )
        return cls(name, process, on_line, stacks)

    async def ended(self) -> str:
        """See `Child`."""
        code = await self.process.wait()
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._reader), timeout=0.5)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            how += ", as the system does when its memory has run out"
        lines = "".join(f"\n  | {line}" for line in self._last_lines)
        return f"the {self.name} process {how}" + (f"; its last lines:{lines}" if lines else "")

    async def stop(self) -> None:
        """See `Child`."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), timeout=_TERMINATE_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
        self._reader.cancel()

    async def stacks(self) -> str:
        """See `Child`."""
        return await ask_for_stacks(self._stacks, self.process.pid)

    async def _read_lines(self) -> None:
        assert self.process.stdout is not None
        while raw := await _read_line(self.process.stdout):
            line = raw.decode("utf-8", "replace").rstrip()
            if line:
                self._last_lines.append(escaped(line))
                self._on_line(f"[{self.name}] {escaped(line)}")


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or as much of an overlong one as is there; nothing at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


class WorkerThread:
    """A text worker inside this process (`--tokenizer-workers 0`): the same code and the same sockets, in a thread."""

    def __init__(self, folder: Path, run_worker: RunWorker) -> None:
        self.name = "text worker thread"
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._alive_reader, self._alive_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(folder, run_worker), name="text-worker", daemon=True)
        self._thread.start()

    async def ended(self) -> str:
        """See `Child`."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """See `Child`."""
        if self._alive_writer >= 0:
            os.close(self._alive_writer)
            self._alive_writer = -1
            await asyncio.to_thread(self._thread.join, 1.0)

    async def stacks(self) -> str:
        """See `Child`."""
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
