"""A server of several models as its own process, and what tests ask of it."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.eventually import SECONDS, eventually, patience

_READY = re.compile(r"models at (http://\S+?),")


@dataclasses.dataclass
class ManyModels:
    process: subprocess.Popen
    log: Path
    private: Path  # its TMPDIR
    http: httpx.Client = dataclasses.field(default_factory=lambda: httpx.Client(timeout=patience(120)))
    url: str = ""

    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, condition, seconds: float = SECONDS):
        eventually(condition, lambda: f"log:\n{self.output()}", seconds=seconds)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    def post(self, path: str, body=None, **how) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **how)

    def complete(self, model: str | None, prompt, **more) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
        return self.post("/v1/completions", body if model is None else {"model": model, **body})

    def cards(self) -> dict[str, dict]:
        return {card["id"]: card for card in self.get("/v1/models").json()["data"]}

    def state(self, model: str) -> str:
        return self.cards()[model]["state"]

    def loads(self, model: str) -> float:
        found = re.search(rf'^tokenmill:model_loads_total{{model="{model}"}} (\S+)$', self.get("/metrics").text, re.M)
        return float(found[1])

    def pids(self) -> list[int]:
        return descendants(self.process.pid)

    def server_of(self, model: str) -> int:
        """The first process of a loaded model: the child whose folder its last start names."""
        folders = [one for one in self.private.glob("tokenmill-*/m*") if (one / "http").exists()]
        found = [pid for pid in descendants(self.process.pid) for one in folders if names(pid, one, model, self.http)]
        assert len(found) == 1, (model, found)
        return found[0]


def names(pid: int, folder: Path, model: str, http: httpx.Client) -> bool:
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"tokenmill.serving.models.child" in arguments and os.fsencode(str(folder)) in arguments:
            transport = httpx.HTTPTransport(uds=str(folder / "http"))
            how = {"headers": http.headers, "timeout": patience()}
            with httpx.Client(transport=transport, base_url="http://model", **how) as client:
                return client.get("/v1/models").json()["data"][0]["id"] == model
    return False


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listed.read_text().split()):
                found += [child, *descendants(child)]
    return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextlib.contextmanager
def many_models(*flags: str) -> Iterator[ManyModels]:
    """Serve until the end of the block; nothing may be left behind then."""
    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        log, private = Path(folder) / "log", Path(folder) / "t"
        private.mkdir()
        command = [sys.executable, "-m", "tokenmill", "serve", "--port", "0", "--device", "cpu", *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(private)})
        server = ManyModels(process, log, private)
        try:
            server.wait_for(lambda: _READY.search(server.output()) or process.poll() is not None)
            assert process.poll() is None, server.output()
            server.url = _READY.search(server.output())[1]
            yield server
            if process.poll() is None:
                pids = server.pids()
                process.send_signal(signal.SIGTERM)
                assert process.wait(patience()) == 0, server.output()
                assert not [pid for pid in pids if is_alive(pid)]
                assert list(private.iterdir()) == []
        finally:
            for pid in (process.pid, *server.pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            server.http.close()
