"""Compare a simulated run with a real one: a server under a trace's load, and the same trace simulated.

    python benchmarks/simulation.py FOLDER [--seconds 600] [--windows 5] [--fit-seconds 30] [--shares 0.5,0.8,0.95]
        [--keep FOLDER]

FOLDER is a model (`python benchmarks/peers/checkpoint.py FOLDER` makes one of Qwen3-0.6B's shape). Requests have the
lengths of the chat profile at 1/16. A server that runs as fast as it can gives the capacity. Then servers take turns,
each with a step log: one that is fitted to, at changing loads, and one that runs a window of a trace, at a share of the
capacity and with another seed. The step model of a window is fitted to the logs in front of it and behind it, so that a
machine whose speed changes over minutes does not count as an error of the model; and a second time to the window's own
log, which leaves the errors of the simulator alone. Compared are means over the windows of a share. The last line is
JSON; `--keep` leaves traces, step logs and step models somewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tokenmill.lab.bench.report import machine_facts
from tokenmill.lab.bench.streams import Stream, run_stream
from tokenmill.lab.bench.workload import PROFILES, Prompt, arrival_times

PORT = 8471
URL = f"http://127.0.0.1:{PORT}"
SCALE = 1 / 16
NUM_PAGES = 4096
FLAGS = ["--quantization", "int8", "--num-pages", str(NUM_PAGES), "--max-model-len", "2048"]
# Shares of the capacity at which the fitted log runs, one after the other.
FITTED_SHARES = (0.3, 0.6, 0.9)
# What is compared: a figure of both documents, in seconds, or tokens a second.
FIGURES = ("tokens_per_second", "e2e_p50", "e2e_p99", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def write_trace(path: Path, count: int, rate: float, seed: int) -> None:
    """A trace of the chat profile in Mooncake's form, in which no prompt has anything in common with another."""
    profile, source = PROFILES["chat"], random.Random(seed)
    prompts, outputs = profile.input_len.scaled(SCALE), profile.output_len.scaled(SCALE)
    lines = []
    for number, at in enumerate(arrival_times(count, rate, profile.variation, seed)):
        lengths = {"input_length": prompts.draw(source), "output_length": max(1, outputs.draw(source))}
        lines.append(json.dumps({"timestamp": 1000 * at, **lengths, "hash_ids": [seed * 1_000_000 + number]}))
    path.write_text("\n".join(lines))


@contextmanager
def serving(model: Path, log: Path) -> Iterator[None]:
    """A server of the model, which writes a step log, until the end."""
    command = [sys.executable, "-m", "tokenmill", "serve", str(model), "--port", str(PORT), "--step-log", str(log)]
    command += FLAGS
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready()
        yield
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready() -> None:
    """Until it answers; RuntimeError after five minutes."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{URL}/health").is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server does not start")


async def drive(path: Path, vocab_size: int) -> list[Stream]:
    """Let the server have a trace."""
    from tokenmill.lab.simulate.traces import TraceOptions, read_trace

    arrivals = read_trace(path, TraceOptions(vocab_size=vocab_size))
    async with httpx.AsyncClient(base_url=URL, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        await run_stream(client, name, Prompt([1, 2, 3], 4), {})
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            sending = []
            for arrival in arrivals:
                await asyncio.sleep(start + arrival.seconds - time.monotonic())
                prompt = Prompt(arrival.token_ids.tolist(), arrival.num_output_tokens)
                sending.append(group.create_task(run_stream(client, name, prompt, {"temperature": 0})))
    return [task.result() for task in sending]


def seen(streams: Sequence[Stream]) -> dict[str, float]:
    """The figures of a real run."""
    assert not any(stream.error for stream in streams), next(stream.detail for stream in streams if stream.error)
    gaps = [gap for stream in streams for gap in stream.gaps]
    first, last = streams[0].sent, max(stream.arrivals[-1] for stream in streams)
    ends = [stream.arrivals[-1] - stream.sent for stream in streams]
    samples = {"e2e": ends, "ttft": [stream.ttft for stream in streams], "itl": gaps}
    figures = {"tokens_per_second": sum(stream.num_tokens for stream in streams) / (last - first)}
    return figures | {f"{name}_p{p}": float(np.percentile(own, p)) for name, own in samples.items() for p in (50, 99)}


def simulated(path: Path, step_model: Path, model: Path) -> dict[str, float]:
    """The figures of the same trace, simulated; and the seconds that this took."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tokenmill", "simulate", str(path), "--step-model", str(step_model), "--json"]
    command += ["--model", str(model), "--beyond", *FLAGS]
    document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    figures = {"tokens_per_second": document["output_tokens_per_second"], "wall": time.perf_counter() - began}
    for name in ("e2e", "ttft", "itl"):
        figures |= {f"{name}_p{p}": document[name][f"p{p}"] for p in (50, 99)}
    return figures


class Runs:
    """Servers of a model that run traces, one after the other.

    Args:
        folder: where traces, logs and step models are left.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self._vocab_size: int = json.loads((model / "config.json").read_text())["vocab_size"]
        self._num_traces = 0

    def capacity(self) -> float:
        """Requests a second, of 300 that come at once."""
        trace, began = self._trace(300, 1e6), 0.0
        with serving(self.model, self.folder / "capacity.log"):
            began = time.monotonic()
            asyncio.run(drive(trace, self._vocab_size))
            return 300 / (time.monotonic() - began)

    def fitted_to(self, capacity: float, seconds: float) -> Path:
        """The log of a server at changing loads, 60 requests at once among them."""
        log = self.folder / f"fit-{self._num_traces}.log"
        shares = [(60, 1e6)] + [(round(share * capacity * seconds / 3), share * capacity) for share in FITTED_SHARES]
        with serving(self.model, log):
            for count, rate in shares:
                asyncio.run(drive(self._trace(max(10, count), rate), self._vocab_size))
        return log

    def window(self, rate: float, seconds: float) -> tuple[Path, Path, dict[str, float]]:
        """The trace of a window, the log of a server that ran it, and its figures."""
        log = self.folder / f"window-{self._num_traces}.log"
        trace = self._trace(max(20, round(rate * seconds)), rate)
        with serving(self.model, log):
            return trace, log, seen(asyncio.run(drive(trace, self._vocab_size)))

    def fit(self, *logs: Path) -> Path:
        """The step model of these logs."""
        path = self.folder / ("+".join(log.stem for log in logs) + ".json")
        command = [sys.executable, "-m", "tokenmill", "fit", *map(str, logs), "-o", str(path)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return path

    def _trace(self, count: int, rate: float) -> Path:
        self._num_traces += 1
        path = self.folder / f"trace-{self._num_traces}.jsonl"
        write_trace(path, count, rate, self._num_traces)
        return path


def mean_of(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {figure: float(np.mean([run[figure] for run in runs])) for figure in runs[0]}


def compared(runs: Runs, rate: float, options: argparse.Namespace, capacity: float, first: Path) -> dict[str, Any]:
    """A share of the capacity: its windows as they were, and as they were simulated. `first`: the log before them."""
    real, near, own, before = [], [], [], first
    for _ in range(options.windows):
        trace, log, figures = runs.window(rate, options.seconds / options.windows)
        behind = runs.fitted_to(capacity, options.fit_seconds)
        real.append(figures)
        near.append(simulated(trace, runs.fit(before, behind), runs.model))
        own.append(simulated(trace, runs.fit(log), runs.model))
        before = behind
    truth = mean_of(real)
    found: dict[str, Any] = {"real": truth, "last": str(before)}
    for kind, models in {"simulated": mean_of(near), "fitted_to_itself": mean_of(own)}.items():
        found |= {kind: models, f"errors_{kind}": {figure: models[figure] / truth[figure] - 1 for figure in FIGURES}}
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each share")
    parser.add_argument("--windows", type=int, default=5, help="that these are cut into")
    parser.add_argument("--fit-seconds", type=float, default=30.0, help="of load between two windows")
    parser.add_argument("--shares", default="0.5,0.8,0.95")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    os.environ["TOKENMILL_NO_COLOR"] = "1"
    document: dict[str, Any] = {"benchmark": "simulation", "seconds": given.seconds, "flags": FLAGS, "runs": []}
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    with nullcontext(given.keep) if given.keep is not None else tempfile.TemporaryDirectory() as name:
        runs = Runs(given.model, Path(name))
        capacity = runs.capacity()
        print(f"capacity: {capacity:.2f} requests a second", file=sys.stderr)
        last = runs.fitted_to(capacity, given.fit_seconds)
        for share in map(float, given.shares.split(",")):
            found = compared(runs, share * capacity, given, capacity, last)
            last = Path(found.pop("last"))
            for kind in ("simulated", "fitted_to_itself"):
                errors = ", ".join(f"{figure} {error:+.1%}" for figure, error in found[f"errors_{kind}"].items())
                print(f"at {share:.0%}, {kind}: {errors}", file=sys.stderr)
            document["runs"].append({"share": share, **found})
        document |= {"capacity": capacity, "windows": given.windows, "machine": machine_facts()}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
