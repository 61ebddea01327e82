"""The same GGUF file in TokenMill and llama.cpp: what both lose against float32 of it, and their speed, in turns.

    python -m benchmarks.peers.same_file [MODEL ...] [--rounds 3] [--threads 1] [--chunks 2]

Models are names of the catalogue, or files. Processor time loses nothing to others on the machine, and with one thread
nothing to waiting for another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.adapter_run import run_adapter
from benchmarks.peers.adapters.adapter import Point, Setup
from benchmarks.peers.models import REAL_MODELS
from benchmarks.peers.peers import PEERS, TOKENMILL
from benchmarks.peers.quality import cut_text, judge_format

from tokenmill.lab.bench.report import machine_facts
from tokenmill.model.weights.catalogue import CATALOGUE, locate

ENGINES = (TOKENMILL, "llama.cpp")
POINTS = (Point("prefill 512", 1, 512, 1), Point("decode 1", 1, 128, 64), Point("decode 8", 8, 128, 64))
STORED = "stored"
RUN_SECONDS = 900.0
KV_BYTES = 1 << 30


def main() -> None:
    """Measure and print a table, then JSON."""
    options = read_options()
    runs: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tokenmill-peers-") as folder:
        for model in options.models:
            path = Path(locate(CATALOGUE[model], Path(folder)) if model in CATALOGUE else model)
            if options.chunks:
                losses += judge(model, path, options, Path(folder))
            runs += measure(model, path, options, Path(folder))
    print(table(runs, losses))
    document = {"benchmark": "same_file", "threads": options.threads, "machine": machine_facts()}
    print(json.dumps(document | {"runs": runs, "losses": losses}))


def read_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.same_file", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("models", nargs="*", default=list(REAL_MODELS), help="names of the catalogue, or GGUF files")
    parser.add_argument("--rounds", type=int, default=3, help="medians are of this many (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="for both (default: 1)")
    parser.add_argument("--chunks", type=int, default=2, help="of 512 tokens, to judge on; 0: none (default: 2)")
    return parser.parse_args()


def judge(model: str, path: Path, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return what both engines lose against float32 of the file."""
    texts = cut_text(path, options.chunks, folder)
    own, other = (replace(next(peer for peer in PEERS if peer.name == name), real=lambda *_: path) for name in ENGINES)
    reference = judge_format(own, model, "float32", texts, options.threads)
    judged = (
        (peer.name, judge_format(peer, model, STORED, texts, options.threads, reference)) for peer in (own, other)
    )
    return [{"model": model, "peer": name, **found} for name, found in judged]


def measure(model: str, path: Path, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the rates of both engines in all rounds; they begin in turns."""
    peers, runs = [next(peer for peer in PEERS if peer.name == name) for name in ENGINES], []
    for number in range(options.rounds):
        for peer in peers if number % 2 == 0 else peers[::-1]:
            outcome = str(folder / "outcome.json")
            setup = Setup(str(path), STORED, options.threads, KV_BYTES, number, time.monotonic(), POINTS, outcome)
            found = run_adapter(peer, setup, RUN_SECONDS)
            if "error" in found:
                raise SystemExit(f"{model} in {peer.name}: {found['error']}")
            runs.append({"model": model, "peer": peer.name, **found})
    return runs


def table(runs: Sequence[dict[str, Any]], losses: Sequence[dict[str, Any]]) -> str:
    """Return medians of both engines and their ratio, for each model and point, and what they lose."""
    lines = [f"{'':32}{'tokens/s':>24}{'tokens/s of processor time':>30}"] if runs else []
    for model in dict.fromkeys(run["model"] for run in runs):
        for point in POINTS:
            kind = "prefill" if point.output_len == 1 else "decode"
            line = f"{f'{Path(model).name}, {point.name}':32}"
            for unit, width in (("second", 24), ("cpu_second", 30)):
                own, other = (
                    statistics.median(
                        run["points"][point.name][f"{kind}_tokens_per_{unit}"]
                        for run in runs
                        if (run["model"], run["peer"]) == (model, name)
                    )
                    for name in ENGINES
                )
                line += f"{f'{own:,.0f} / {other:,.0f} = {own / other:.2f}':>{width}}"
            lines.append(line)
    for one in losses:
        figures = f"perplexity {one['ppl_ratio']:.4f} of float32's, KL {one['kl_mean']:.5f}, p99 {one['kl_p99']:.4f}"
        lines.append(f"{Path(one['model']).name}, {one['peer']}: {figures}, same top {one['same_top']:.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
