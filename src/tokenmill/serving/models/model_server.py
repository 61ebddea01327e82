"""`ModelServer`: the processes of one model as its keeper's process sees them: started, reported on, ended, gone.

Gone means that all of them have exited, those too that a server which was killed has left behind: before, their memory
is not free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import msgspec

from tokenmill.ipc.python_child import start_python
from tokenmill.serving.models.reports import Complaint, Launch, Report
from tokenmill.serving.replicas.children import ChildProcess

CHILD_MODULE = "tokenmill.serving.models.child"
SOCKET = "http"
# The folder of stored responses, beside those of the servers, where none is given.
RESPONSES = "responses"
# Its last streams have ended before it is told to stop; what it writes to a disk may take a while.
_STOP_SECONDS = 30.0
_ORPHAN_SECONDS = 2.0
# The end of a process is noticed later than that of its connections.
_NOTICE_SECONDS = 2.0
_LOOK_SECONDS = 0.01
_CONNECT_SECONDS = 5.0
# A client that has left is forgotten a moment later.
_SLEEP_PAUSES = (0.0, 0.02, 0.1, 0.3)
# A file of the disk that is no code; memory that processes share lies in files of other places.
_MAPPED = re.compile(r"^(\w+)-(\w+) r\S+ \w+ \S+ [1-9]\d* +/(?!dev/|memfd:)(?!.*\.so\b).*$", re.MULTILINE)
_OWN = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)
_REPORTS = msgspec.json.Decoder(Report)


class ProcessBytes(msgspec.Struct, frozen=True):
    """Bytes of processes: their own memory, as far as it is used, and files of data that they have mapped."""

    own: int
    mapped: int


class ModelServer:
    """The server of one model, from its start to the exit of its last process.

    It is started before it is known which model it will serve, loads its code, and waits for `serve`.

    Attributes:
        is_gone: set once its keeper knows that all its processes have exited.
        folder: its private one; it listens on `SOCKET` there.
        http: a client of it.
        problem: its own last word on why it ended; "": none.
    """

    def __init__(self, folder: Path, on_line: Callable[[str], None]) -> None:
        """Start it in a folder that is made here; `on_line` is called with lines of its log."""
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.problem = ""
        self.is_gone = asyncio.Event()
        self._on_report: Callable[[Report], None] = lambda report: None
        self._rest = b""
        reader, writer = os.pipe()
        try:
            process = start_python(
                ["-m", CHILD_MODULE, str(folder), str(writer), str(os.getpid())],
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
        self._child = ChildProcess("model", process, on_line, folder / "stacks")
        self.http = _client(folder / SOCKET)

    @property
    def is_alive(self) -> bool:
        """True while its first process has not exited."""
        return self._child.process.poll() is None

    def serve(self, name: str, launch: Launch, on_report: Callable[[Report], None]) -> None:
        """Let it serve a model; `on_report` is called with its reports, but for complaints."""
        self._child.name = name
        self._on_report = on_report
        stdin = self._child.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which its end will tell
            stdin.write(msgspec.json.encode(launch))
            stdin.close()

    @property
    def pid(self) -> int:
        """Id of its first process."""
        return self._child.process.pid

    def stop(self) -> None:
        """Tell it to end, and kill it if it does not in time."""
        with contextlib.suppress(ProcessLookupError):
            self._child.process.terminate()
        self._loop.call_later(_STOP_SECONDS, self._kill)

    def bytes_of(self) -> ProcessBytes:
        """Return what its processes hold; nothing where the system does not tell."""
        pids, own, mapped = [self.pid], 0, 0
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                found = _OWN.search(Path(f"/proc/{pid}/status").read_text())
                own += int(found[1]) << 10 if found else 0
                for begin, end in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()):
                    mapped += int(end, 16) - int(begin, 16)
                for listed in Path(f"/proc/{pid}/task").glob("*/children"):
                    pids += map(int, listed.read_text().split())
        return ProcessBytes(own, mapped)

    async def sleep(self, keys: Sequence[str]) -> bool:
        """Have it give its KV's memory back; return False if it cannot, or answers something still.

        Args:
            keys: API keys that it takes; empty: it needs none.
        """
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        for pause in _SLEEP_PAUSES:
            await asyncio.sleep(pause)
            try:
                reply = await self.http.post("/sleep", headers=headers, timeout=_STOP_SECONDS)
            except httpx.HTTPError:
                return False
            if reply.status_code != httpx.codes.CONFLICT:
                break
        return reply.status_code == httpx.codes.OK

    async def lost(self) -> None:
        """Wait, after a connection has failed, until it is known to be gone; return soon if it lives."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.is_gone.wait(), _NOTICE_SECONDS if self.is_alive else _STOP_SECONDS)

    async def gone(self) -> tuple[str, int]:
        """Wait until all its processes have exited; return how the first one ended, and its exit code."""
        how = await self._child.ended()
        self._read_reports()
        self._close_reader()
        code = self._child.process.returncode
        await self._end_orphans()
        await self._child.stop()
        await self.http.aclose()
        shutil.rmtree(self.folder, ignore_errors=True)
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
        mark = os.fsencode(str(self.folder))
        for listed in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in map(int, listed.read_text().split()):
                    with contextlib.suppress(OSError):
                        if mark in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                            yield pid


def _client(socket: Path) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=limits),
        timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
        base_url="http://model",
        headers={"accept-encoding": "identity"},
    )
