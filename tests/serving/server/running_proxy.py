"""`tokenmill proxy` as its own process, in front of servers that run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.serving.server.running_server import REPOSITORY, RunningServer, free_port


class RunningProxy(RunningServer):
    """Answers as the servers behind it do; its process is what the operator looks at."""

    @property
    def api_pids(self) -> list[int]:
        return [self.process.pid]


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Command line flags for fields of a config."""
    given = []
    for name, value in settings.items():
        for one in value if isinstance(value, tuple) else (value,):
            given += [f"--{name.replace('_', '-')}", str(one)]
    return given


@contextlib.contextmanager
def start_proxy(prefill: Sequence[str], decode: Sequence[str], **settings: Any) -> Iterator[RunningProxy]:
    """A proxy that accepts requests; ended with SIGTERM at the end if it still runs."""
    port, private = free_port(), Path(tempfile.mkdtemp(prefix="tm-test-"))
    servers = [f"--prefill={url}" for url in prefill] + [f"--decode={url}" for url in decode]
    command = [sys.executable, "-m", "tokenmill", "proxy", *servers, "--port", str(port), *flags_of(settings)]
    log = private.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=REPOSITORY, env=os.environ)
    running = RunningProxy(process, f"http://127.0.0.1:{port}", log, private)
    try:
        running.wait_for(lambda: is_listening(running.url) or process.poll() is not None)
        assert process.poll() is None, running.output()
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)
        running.clean()


def is_listening(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.HTTPError:
        return False
    return True
