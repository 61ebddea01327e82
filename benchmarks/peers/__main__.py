"""Compare TokenMill with other engines on this machine, interleaved, in one run.

python -m benchmarks.peers                                   everything: environments, models, runs, report
python -m benchmarks.peers --peers TokenMill,llama.cpp --formats int4 --rounds 1
python -m benchmarks.peers --report-only                     docs/performance.md again from the last results

Formats are judged on published models, which `make real` installs: see quality.py. `--shape smollm2` times these, too:
losses and speeds of the same weights, which docs/performance.md has in a part of its own. The table at the end counts
processor time, which others on the machine do not take; with more than one thread it has what threads wait for each
other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.adapter_run import run_adapter
from benchmarks.peers.adapters.adapter import Point, Setup
from benchmarks.peers.environments import BUILD, python_of
from benchmarks.peers.models import BITS_VARIABLE, JUDGED, SHAPE_VARIABLE, SHAPES
from benchmarks.peers.peers import FORMATS, PEERS, TOKENMILL, Peer
from benchmarks.peers.report import PUBLISHED, RESULTS, offline_table, write_report

from tokenmill.lab.bench.report import machine_facts

RUN_SECONDS = 900.0
GIB = 1 << 30
POINTS = (
    Point("prefill 512", 1, 512, 1, repeats=3),
    Point("decode 1", 1, 128, 64),
    Point("decode 8", 8, 128, 64),
    Point("decode 32", 32, 128, 64),
)
LONG_CONTEXT = Point("decode 8 at 2048", 8, 2048, 64)
# Enough to see that an engine runs; the last has more tokens than llama.cpp takes at once.
QUICK_POINTS = (Point("prefill 512", 1, 512, 1), Point("decode 1", 1, 16, 2), Point("decode 32", 32, 72, 2))


def main() -> int:
    """Returns 1 when a run failed, else 0."""
    options = read_options()
    os.environ[SHAPE_VARIABLE] = options.shape
    if options.bits is not None:
        os.environ[BITS_VARIABLE] = str(options.bits)
    if options.report_only:
        write_report()
        return 0
    kept = {SHAPES[0]: RESULTS, JUDGED[0]: PUBLISHED}
    options.results = options.results or kept.get(options.shape, BUILD / f"results-{options.shape}.json")
    chosen = [(peer, weights) for peer in PEERS for weights in FORMATS if weights in peer.formats]
    chosen = [(p, w) for p, w in chosen if p.name in options.peers and w in options.formats]
    chosen = [(p, w) for p, w in chosen if options.shape not in JUDGED or p.real is not None]
    for peer, weights in chosen:
        python_of(peer.environment)
        peer.path(weights, options.shape)
    results: dict[str, Any] = {
        "shape": options.shape,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": {**machine_facts(), "kernel": platform.release()},
        "threads": options.threads,
        "kv_gib": options.kv_gib,
        "rounds": options.rounds,
        "runs": [],
        "quality": [],
        "serving": [],
    }
    if options.quality:
        from benchmarks.peers.quality import judge_all

        models = [options.shape] if options.shape in JUDGED else JUDGED
        results["quality"] = judge_all(models, chosen, options.threads, options.chunks)
    for entry in measure_all(chosen, options):
        results["runs"].append(entry)
        # After each run: what has been measured outlives an interruption.
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    if options.serving:
        from benchmarks.peers.serving import compare

        results["serving"] = compare(options.threads, options.kv_gib, options.rounds, 16 if options.quick else 160)
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    if not options.quick and options.rounds and options.results == kept.get(options.shape):
        write_report()
    print(offline_table(results["runs"], results["quality"], "cpu_second"))
    return int(any("error" in entry for entry in results["runs"]))


def measure_all(chosen: list[tuple[Peer, str]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One entry for each engine, format and round, the rounds one after the other; each begins with another engine."""
    from benchmarks.peers.probe import probe

    for number in range(options.rounds):
        first = number * len(chosen) // options.rounds
        for peer, weights in chosen[first:] + chosen[:first]:
            probed = probe(options.threads)
            start = time.monotonic()
            entry = {"peer": peer.name, "weights": weights, "round": number, "probe": probed}
            entry |= run_one(peer, weights, number, options)
            entry["seconds"] = time.monotonic() - start
            print(_line(entry), file=sys.stderr)
            yield entry


def run_one(peer: Peer, weights: str, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one engine in a process of its own: what its adapter writes, and its peak memory; or its error."""
    points = QUICK_POINTS if options.quick else POINTS
    if peer.name == TOKENMILL and not options.quick:
        points += (LONG_CONTEXT,)
    setup = Setup(
        str(peer.path(weights, options.shape)),
        weights,
        options.threads,
        options.kv_gib * GIB,
        number,
        time.monotonic(),
        points,
        str(BUILD / f"{peer.adapter}-{weights}.outcome.json"),
    )
    return run_adapter(peer, setup, RUN_SECONDS)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", type=_choice(names), default=names, help=f"some of {','.join(names)}")
    parser.add_argument("--formats", type=_choice(FORMATS), default=FORMATS, help=f"some of {','.join(FORMATS)}")
    choices = (*SHAPES, *JUDGED)
    parser.add_argument("--shape", choices=choices, default=SHAPES[0], help="of the model; the report is of the first")
    parser.add_argument("--rounds", type=int, default=3, help="medians are of this many (default: 3)")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), help="for every engine")
    parser.add_argument("--kv-gib", type=int, default=2, help="memory for KV in GiB (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a few tokens each, to see that everything runs")
    parser.add_argument("--quality", action=argparse.BooleanOptionalAction, default=True, help="judge formats, too")
    parser.add_argument("--chunks", type=int, default=4, help="of 512 tokens, that formats are judged on (default: 4)")
    parser.add_argument("--bits", type=float, help="bits of a weight of TokenMill's int4 (default: its own)")
    parser.add_argument("--serving", action=argparse.BooleanOptionalAction, default=True, help="also over HTTP")
    parser.add_argument("--results", type=Path, help="file for the results (default: one that the page is made of)")
    parser.add_argument("--report-only", action="store_true", help="only write the report of the results again")
    return parser.parse_args()


def _choice(names: list[str] | tuple[str, ...]) -> Any:
    def read(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = set(chosen) - set(names)
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return chosen

    return read


def _line(entry: dict[str, Any]) -> str:
    head = f"{entry['peer']} {entry['weights']}, round {entry['round'] + 1}: "
    if "error" in entry:
        return f"{head}FAILED: {entry['error']}"
    figures = ", ".join(
        f"{name} {point['decode_tokens_per_second'] or point['prefill_tokens_per_second']:.1f}"
        for name, point in entry["points"].items()
    )
    return f"{head}{figures} tokens/s; first token {entry['first_token_seconds']:.1f} s; {entry['seconds']:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
