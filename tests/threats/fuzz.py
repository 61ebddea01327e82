"""Odd bodies for all routes of a server: none may bring it out of step, or make others wait.

    python -m tests.threats.fuzz [--bodies 20000] [--seed N] [--max-megabytes 16]

Prints one line of JSON last: how many of each status there were, what went wrong (anything above 499 but 503 and
507, or no answer at all), and for how long the event loop stood still at most, with the request that was the cause.
"""

import argparse
import collections
import contextlib
import http.client
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from tests.checkpoints import make_checkpoint
from tests.seeding import root_seed
from tests.serving.server.running_server import RunningServer, start_server
from tests.threats.odd_bodies import MIB, OddRequest, OddRequests
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

# The first never ends, the others stop an engine, start one, or wait for all of them.
LEFT_OUT = frozenset({"/live", "/pause", "/health_generate", "/engines/add", "/update_weights_from_disk"})
# What a server may say that has no fault: it is busy or stopping, or its disk is full.
MAY_BE = (503, 507)
ANSWER_SECONDS = 60.0
# What no request should cost the loop.
MOST_SECONDS = 0.02
_STALL = re.compile(r"^STALL (\S+)$", re.MULTILINE)


class Findings:
    """The outcomes of the requests."""

    def __init__(self) -> None:
        self.statuses: collections.Counter[int] = collections.Counter()
        self.failures: list[str] = []
        self.worst = (0.0, "")

    def note(self, request: OddRequest, status: int, stall: float) -> None:
        """Take in the outcome of one; status 0: there was no answer."""
        self.statuses[status] += 1
        if status == 0 or (status >= 500 and status not in MAY_BE):
            self.failures.append(f"{status}: {request.what} [{request.path[:60]}]")
            print(self.failures[-1], file=sys.stderr, flush=True)
        caused = f"{request.what[:200]} ({len(request.body)} bytes)"
        if stall > MOST_SECONDS:
            print(f"{1000 * stall:.1f} ms: {caused}", file=sys.stderr, flush=True)
        self.worst = max(self.worst, (stall, caused))


class Stalls:
    """Reads what the probe of a server says."""

    def __init__(self, server: RunningServer) -> None:
        self._log = server.log.open()

    def longest(self) -> float:
        """Seconds, since the last call."""
        return max((float(found) for found in _STALL.findall(self._log.read())), default=0.0)


def start(folder: Path):
    """A server with a small model that has everything switched on, and says for how long its loop stands still."""
    engine = EngineConfig(model=str(make_checkpoint(folder / "tiny", "qwen3")), num_pages=600, max_num_seqs=16)
    parsers = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
    batches = str(folder / "batches")
    return start_server(engine, ENGINE_MODULE, probe_loop=True, batch_dir=batches, max_restarts=0, **parsers)


def fuzz(server: RunningServer, requests: OddRequests, count: int) -> Findings:
    """Send so many, one after the other; the server must be well at the end.

    Raises:
        AssertionError: it is not, or requests are left over.
    """
    findings, stalls = Findings(), Stalls(server)
    stalls.longest()  # those of the start
    with contextlib.closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=ANSWER_SECONDS)) as line:
        for _ in range(count):
            request = requests.draw()
            findings.note(request, answered(line, request), stalls.longest())
    assert server.process.poll() is None, server.output()[-3000:]
    server.wait_for(lambda: server.http.get(f"{server.url}/health").status_code == 200)
    server.post("/abort_requests", {"abort_all": True})
    server.wait_until_unused()
    return findings


def answered(line: http.client.HTTPConnection, request: OddRequest) -> int:
    """The status of the answer, all of which is read; 0: none came, also on a fresh connection."""
    for _ in range(2):
        try:
            line.request(request.method, request.path, request.body or None, request.headers)
            reply = line.getresponse()
            reply.read()
            return reply.status
        except TimeoutError:
            line.close()
            return 0
        except (http.client.HTTPException, OSError):
            line.close()  # it was closed after an answer that came before all of a body was read
    return 0


def main() -> int:
    """Fuzz and print; 1 where something went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=root_seed())
    parser.add_argument("--max-megabytes", type=float, default=16)
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder, start(Path(folder)) as server:
        document = server.http.get(f"{server.url}/openapi.json").json()
        rng = random.Random(options.seed)
        requests = OddRequests(document, rng, int(options.max_megabytes * MIB), LEFT_OUT)
        findings = fuzz(server, requests, options.bodies)
        tracebacks = server.output().count("Traceback")
    seconds, what = findings.worst
    print(
        json.dumps(
            {
                "seed": options.seed,
                "bodies": options.bodies,
                "statuses": {str(status): count for status, count in sorted(findings.statuses.items())},
                "failures": findings.failures[:50],
                "num_failures": len(findings.failures),
                "tracebacks": tracebacks,
                "worst_stall_ms": round(1000 * seconds, 1),
                "worst_request": what,
            }
        )
    )
    return 1 if findings.failures or tracebacks else 0


if __name__ == "__main__":
    sys.exit(main())
