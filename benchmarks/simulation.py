"""How far a simulated run is from a real one: a server under a trace's load, and the same trace simulated.

    python benchmarks/simulation.py FOLDER [--seconds 600] [--fit-seconds 180] [--shares 0.5,0.8,0.95] [--keep FOLDER]

FOLDER is a model (`python benchmarks/peers/checkpoint.py FOLDER` makes one of Qwen3-0.6B's shape). Requests have the
lengths of the chat profile at 1/16. First a server runs as fast as it can and then at changing loads, with a step log;
the step model is fitted to that. Then a server of its own runs a trace for each share of that capacity, with other
seeds, and so does the simulator. The last line is JSON; `--keep` leaves traces, step logs and the step model somewhere.
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

from tokenmill.cli.bench.report import machine_facts
from tokenmill.cli.bench.streams import Stream, run_stream
from tokenmill.cli.bench.workload import PROFILES, Prompt, arrival_times

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
    from tokenmill.simulate.traces import TraceOptions, read_trace

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


def fitted(model: Path, folder: Path, seconds: float, vocab_size: int) -> tuple[float, Path]:
    """The capacity in requests a second, and the step model fitted to a log of other traces."""
    trace, log = folder / "fit.jsonl", folder / "fit.log"
    with serving(model, log):
        write_trace(trace, 300, 1e6, 101)
        began = time.monotonic()
        asyncio.run(drive(trace, vocab_size))
        capacity = 300 / (time.monotonic() - began)
        for number, share in enumerate(FITTED_SHARES):
            rate = share * capacity
            write_trace(trace, max(20, round(rate * seconds / len(FITTED_SHARES))), rate, 102 + number)
            asyncio.run(drive(trace, vocab_size))
    command = [sys.executable, "-m", "tokenmill", "fit", str(log), "-o", str(folder / "steps.json")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return capacity, folder / "steps.json"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--fit-seconds", type=float, default=180.0)
    parser.add_argument("--shares", default="0.5,0.8,0.95")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    vocab_size = json.loads((given.model / "config.json").read_text())["vocab_size"]
    os.environ["TOKENMILL_NO_COLOR"] = "1"
    document: dict[str, Any] = {"benchmark": "simulation", "seconds": given.seconds, "flags": FLAGS, "runs": []}
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    with nullcontext(given.keep) if given.keep is not None else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        capacity, step_model = fitted(given.model, folder, given.fit_seconds, vocab_size)
        print(f"capacity: {capacity:.2f} requests a second", file=sys.stderr)
        for number, share in enumerate(map(float, given.shares.split(","))):
            trace, rate = folder / f"{share}.jsonl", share * capacity
            write_trace(trace, max(20, round(rate * given.seconds)), rate, number)
            with serving(given.model, folder / f"{share}.log"):
                real = seen(asyncio.run(drive(trace, vocab_size)))
            model = simulated(trace, step_model, given.model)
            errors = {figure: model[figure] / real[figure] - 1 for figure in FIGURES}
            print(f"at {share:.0%}: " + ", ".join(f"{k} {v:+.1%}" for k, v in errors.items()), file=sys.stderr)
            document["runs"].append({"share": share, "real": real, "simulated": model, "errors": errors})
        document |= {"capacity": capacity, "machine": machine_facts()}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
