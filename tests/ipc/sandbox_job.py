"""Jobs for the tests of the sandbox, and programs that use one. Runs as a sandbox's process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.ipc.sandbox import Limits, Sandbox
from tokenmill.ipc.sandbox_process import run_jobs

MODULE = "tests.ipc.sandbox_job"
LIMITS = Limits(0.5, 64 << 20)


def job(data: bytes) -> bytes:
    verb, _, rest = data.partition(b" ")
    match verb:
        case b"echo":
            return rest
        case b"pause":
            _tell(Path(rest.decode()))
            time.sleep(3600)
        case b"once":
            if not Path(rest.decode()).exists():
                _tell(Path(rest.decode()))
                time.sleep(3600)
        case b"refuse":
            raise InvalidRequest(rest.decode())
        case b"raise":
            raise RuntimeError("a fault of the job")
        case b"spin":
            while True:
                pass
        case b"eat":
            return bytes(len(bytearray(1 << 30)) // (1 << 30))
        case b"kill":
            os.kill(os.getpid(), int(rest))
        case b"write":
            os.write(1, b"x" * 100)
        case b"files":
            return "\n".join(os.readlink(f"/proc/self/fd/{one}") for one in _descriptors()).encode()
    return b"done"


def _tell(path: Path) -> None:
    """Write down, at once and as a whole, who runs: the process and its fork."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(f"{os.getppid()} {os.getpid()}")
    new.rename(path)


def _descriptors() -> list[str]:
    return [one for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")]


def main() -> None:
    if sys.argv[1] == "ask":  # a parent for the tests to kill
        sandbox = Sandbox(MODULE, [], LIMITS)
        sandbox.ask(b"echo")
        print(*sandbox.pids, flush=True)
        sandbox.ask(sys.argv[2].encode())
        signal.pause()
    stuck = sys.argv[2:] == ["stuck"]
    run_jobs(
        job, (lambda: time.sleep(3600)) if stuck else (lambda: None), msgspec.json.decode(sys.argv[1], type=Limits)
    )


if __name__ == "__main__":
    main()
