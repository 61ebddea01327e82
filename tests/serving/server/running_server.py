"""A server as its own process, for tests that talk to it as clients do."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
import openai

from tests.eventually import SECONDS, eventually, patience
from tests.serving.server.run_server import Spec
from tokenmill.config.configs import EngineConfig, ServerConfig

REPOSITORY = Path(__file__).parents[3]
STUB = "tests.serving.server.stub_engine"
# What a body must say that it is; httpx says so only of what it has encoded itself.
JSON = {"Content-Type": "application/json"}


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that the kernel gives to nobody else for a minute, but to who asks for it by its number.

    It picks one of 14,000 by chance, those too that a server is only about to bind. What has closed a connection stays
    there in TIME_WAIT, and keeps it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, which may bind it then
        probe.bind((host, 0))
        probe.listen()
        with socket.create_connection(probe.getsockname()):
            probe.accept()[0].close()
        return probe.getsockname()[1]


@dataclasses.dataclass
class RunningServer:
    process: subprocess.Popen
    url: str
    log: Path
    private: Path
    http: httpx.Client = dataclasses.field(default_factory=lambda: httpx.Client(timeout=patience(), headers=JSON))

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=patience())

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=patience())

    def post(self, path: str, body=None, **how) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **how)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the samples of this name that have these labels."""
        text = self.http.get(f"{self.url}/metrics").text
        found = re.findall(rf"^tokenmill:{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        values = [float(value) for given, value in found if wanted <= set(given.split(","))]
        if not values:
            raise KeyError(name)
        return sum(values)

    def settled_metric(self, name: str) -> float:
        """The same, with everything that was answered before this call.

        An engine reports a few times a second, so what an answered request did may be missing yet. Behind the answer to
        a command it reports at once, on the same way: when the second answer is here, so is the first report.
        """
        for _ in range(2):
            self.post("/reset_prefix_cache")
        return self.metric(name)

    def wait_for(self, condition, seconds: float = SECONDS) -> None:
        eventually(condition, lambda: f"log:\n{self.output()}", seconds=seconds)

    def wait_until_unused(self) -> None:
        """Until no request, row or pinned page is left: what an aborted request must lead to."""
        for name in ("num_requests_running", "num_requests_waiting", "num_rows_used", "num_pages_pinned"):
            self.wait_for(lambda name=name: self.metric(name) == 0)

    def output(self) -> str:
        return self.log.read_text()

    def says_ready(self) -> bool:
        return "READY" in self.output()

    def is_well(self) -> bool:
        """Return True if /health says so."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=patience()).status_code == 200
        return False

    @property
    def api_pid(self) -> int:
        """The process that serves, the first if there are several: a child of the one that was started, unless nothing
        is ever started again."""
        return min(self.api_pids, default=self.process.pid)

    @property
    def api_pids(self) -> list[int]:
        """All children of the process that was started: those that serve."""
        with contextlib.suppress(FileNotFoundError):  # it has ended, and so have its children
            own = command_of(self.process.pid)
            return [pid for pid, command in children_of(self.process.pid).items() if command == own]
        return []

    def children(self) -> dict[str, int]:
        """Process ids of the engines and text workers by module."""
        found = {}
        for pid, command in children_of(self.api_pid).items():
            module = command[command.index("-m") + 1 :] if "-m" in command else []
            found[" ".join(module[:1] + module[2:-1])] = pid  # without its folder and its life
        return found

    def clean(self) -> None:
        """Remove what this helper made."""
        self.http.close()
        self.log.unlink(missing_ok=True)
        shutil.rmtree(self.private)

    def wait_for_end(self, seconds: float = SECONDS) -> int:
        """Exit code; also checks that no process and no folder is left behind."""
        pids = list(self.children().values())
        code = self.process.wait(timeout=patience(seconds))
        self.wait_for(lambda: not any(is_alive(pid) for pid in pids))
        assert list(self.private.iterdir()) == []
        return code


def children_of(parent: int) -> dict[int, list[str]]:
    """The command lines of a process's children."""
    found = {}
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    found[pid] = command_of(pid)
    return found


def command_of(pid: int) -> list[str]:
    """The words of a process's command line; those that a fork gives itself are parted by spaces."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def launch(
    command: Sequence[str], folder: Path = REPOSITORY, environment: Mapping[str, str] = os.environ, output=None, port=0
) -> RunningServer:
    """Start a command that takes its port behind it, in a folder; its words go to a file, if not to `output`."""
    port = port or free_port()
    private = Path(tempfile.mkdtemp(prefix="tm-test-"))  # short, since it holds sockets
    log = private.with_suffix(".log")
    with log.open("w") as file:
        words = file if output is None else output
        process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=folder, stdout=words, stderr=words,
            env={**environment, "TMPDIR": str(private)},
        )  # fmt: skip
    return RunningServer(process, f"http://127.0.0.1:{port}", log, private)


@contextlib.contextmanager
def serving(
    command: Sequence[str], folder: Path = REPOSITORY, environment: Mapping[str, str] = os.environ
) -> Iterator[RunningServer]:
    """Run a command that serves until the end, when SIGINT must take it down cleanly."""
    running = launch(command, folder, environment)
    try:
        running.wait_for(lambda: running.process.poll() is not None or running.is_well())
        assert running.process.poll() is None, running.output()
        yield running
        running.process.send_signal(signal.SIGINT)
        assert running.wait_for_end() == 0, running.output()
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.clean()


def spawn(engine: EngineConfig, engine_module: str = STUB, **server) -> RunningServer:
    """Start a server and do not wait for it.

    `output`: what it writes to instead of the file that tests read. `command`: what to run instead of `run_server`; its
    port comes behind.
    """
    port, output, command = server.pop("port", 0) or free_port(), server.pop("output", None), server.pop("command", ())
    names = ("engines", "max_files", "max_file_bytes", "probe_loop", "worker_module")
    extra = {name: server.pop(name) for name in names if name in server}
    if not command:
        spec = Spec(engine, ServerConfig(port=port, **server), engine_module, **extra)
        command = [sys.executable, "-m", "tests.serving.server.run_server", msgspec.json.encode(spec).decode()]
    return launch(command, environment={**os.environ, "PYTHONPATH": str(REPOSITORY)}, output=output, port=port)


@contextlib.contextmanager
def start_server(engine: EngineConfig, engine_module: str = STUB, **server) -> Iterator[RunningServer]:
    """A server that accepts requests; ended with SIGINT at the end if it still runs."""
    is_ready = RunningServer.is_well if "output" in server else RunningServer.says_ready
    running = spawn(engine, engine_module, **server)
    try:
        running.wait_for(lambda: is_ready(running) or running.process.poll() is not None)
        assert running.process.poll() is None, running.output()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            try:
                running.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                running.process.kill()
        running.clean()
