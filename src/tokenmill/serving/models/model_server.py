"""`ModelServer`: the processes of one model as its keeper's process sees them: started, reported on, ended, gone.

Gone means that all of them have exited, those too that a server which was killed has left behind: before, their memory
is not free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec

from tokenmill.ipc.python_child import start_python
from tokenmill.serving.models.reports import Complaint, Launch, Report
from tokenmill.serving.replicas.children import ChildProcess

CHILD_MODULE = "tokenmill.serving.models.child"
SOCKET = "http"
# Its last streams have ended before it is told to stop; what it writes to a disk may take a while.
_STOP_SECONDS = 30.0
_ORPHAN_SECONDS = 2.0
_LOOK_SECONDS = 0.01
_CONNECT_SECONDS = 5.0
_REPORTS = msgspec.json.Decoder(Report)


class ModelServer:
    """The server of one model, from its start to the exit of its last process.

    Attributes:
        http: a client of it. problem: its own last word on why it ended; "": none.
    """

    def __init__(
        self, name: str, launch: Launch, on_report: Callable[[Report], None], on_line: Callable[[str], None]
    ) -> None:
        """Start it; it listens on `SOCKET` in the folder of `launch`, which is made here.

        Args:
            on_report, on_line: called with its reports, but for complaints, and with lines of its log.
        """
        self.name = name
        self.problem = ""
        self._folder = Path(launch.folder)
        self._folder.mkdir(mode=0o700)
        self._on_report = on_report
        self._rest = b""
        reader, writer = os.pipe()
        try:
            process = start_python(
                ["-m", CHILD_MODULE, str(writer), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
            )
        finally:
            os.close(writer)
        self._reader = reader
        os.set_blocking(reader, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reader, self._read_reports)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already, which its end will tell
            process.stdin.write(msgspec.json.encode(launch))
            process.stdin.close()
        self._child = ChildProcess(name, process, on_line, self._folder / "stacks")
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self.http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self._folder / SOCKET), limits=limits),
            timeout=timeout,
            base_url="http://model",
            headers={"accept-encoding": "identity"},
        )

    @property
    def pid(self) -> int:
        """Id of its first process."""
        return self._child.process.pid

    def stop(self) -> None:
        """Tell it to end, and kill it if it does not in time."""
        with contextlib.suppress(ProcessLookupError):
            self._child.process.terminate()
        self._loop.call_later(_STOP_SECONDS, self._kill)

    async def gone(self) -> tuple[str, int]:
        """Wait until all its processes have exited; return how the first one ended, and its exit code."""
        how = await self._child.ended()
        self._read_reports()
        self._close_reader()
        code = self._child.process.returncode
        await self._end_orphans()
        await self._child.stop()
        await self.http.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)
        return self.problem or how, code

    def _kill(self) -> None:
        if self._child.process.returncode is None:
            self._child.kill("the server of all models: it did not end when it was told to")

    def _read_reports(self) -> None:
        if self._reader < 0:
            return
        try:
            data = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._close_reader()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            report = _REPORTS.decode(line)
            if isinstance(report, Complaint):
                self.problem = report.sentence
            else:
                self._on_report(report)

    def _close_reader(self) -> None:
        if self._reader >= 0:
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1

    async def _end_orphans(self) -> None:
        """Wait for the processes that the server has left behind, and kill those that stay."""
        started = self._loop.time()
        while orphans := list(self._orphans()):
            for pid in orphans:
                if self._loop.time() - started > _ORPHAN_SECONDS:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            await asyncio.sleep(_LOOK_SECONDS)

    def _orphans(self) -> Iterator[int]:
        """Return the children of this process that name the folder of this server; see `adopt_orphans`."""
        mark = os.fsencode(str(self._folder) + "/")
        for listed in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in map(int, listed.read_text().split()):
                    with contextlib.suppress(OSError):
                        if mark in Path(f"/proc/{pid}/cmdline").read_bytes():
                            yield pid
