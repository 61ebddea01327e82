"""Print what generation and vectors cost each other in one engine: p99 of each load alone and of both, one JSON line.

    tokenmill serve MODEL --port 8000 &
    python benchmarks/mixed_load.py --url http://127.0.0.1:8000 --chat-rate 1 --text-rate 4

Loads come at drawn times (Poisson), at the same times alone and together, for a model that generates and also embeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from math import inf
from typing import Any

from rich.progress import Progress

from tokenmill.lab.bench.report import machine_facts, percentile
from tokenmill.lab.bench.serve import Load, drive
from tokenmill.lab.bench.streams import Backend
from tokenmill.lab.bench.workload import UniformLengths, Workload

KINDS = ("generation", "vectors")


def loads_of(arguments: argparse.Namespace) -> dict[str, Load]:
    """Return the load of each kind, for about `--seconds` seconds."""
    chats, calls = (max(2, round(rate * arguments.seconds)) for rate in (arguments.chat_rate, arguments.text_rate))
    size = arguments.texts_of_a_call
    chat = Workload(chats, UniformLengths(20, 60), UniformLengths(arguments.output_len, arguments.output_len), 0)
    text = Workload(calls * size, UniformLengths(arguments.text_len, arguments.text_len), UniformLengths(1, 1), 1)
    fields: dict[str, Any] = {"temperature": 0.0}
    return {
        "generation": Load(chat, arguments.chat_rate, 1.0, None, arguments.max_token_id, 1, fields),
        "vectors": Load(text, arguments.text_rate, 1.0, None, arguments.max_token_id, 1, {}, Backend.EMBEDDINGS, size),
    }


async def measured(url: str, loads: dict[str, Load]) -> dict[str, dict[str, float]]:
    """Put all loads on a server at once; return p50 and p99 of their requests, and of the gaps between tokens."""
    with Progress(disable=True) as bar:
        found = await asyncio.gather(*(drive(url, "", None, load, bar) for load in loads.values()))
    figures = {}
    for kind, (_, streams, _) in zip(loads, found, strict=True):
        failed = [stream for stream in streams if stream.error is not None]
        if failed:
            raise SystemExit(f"{kind}: {failed[0].error}: {failed[0].detail}")
        whole = [stream.arrivals[-1] - stream.sent for stream in streams]
        figures[kind] = {"requests": len(whole), "p50": percentile(whole, 50), "p99": percentile(whole, 99)}
        gaps = [gap for stream in streams for gap in stream.gaps]
        if gaps:
            figures[kind]["inter_token_p99"] = percentile(gaps, 99)
    return figures


def main() -> None:
    """Measure each load alone, then both, as often as `--rounds` says, and print the medians' ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--chat-rate", type=float, default=1.0, help="generations per second")
    parser.add_argument("--text-rate", type=float, default=4.0, help="calls for vectors per second")
    parser.add_argument("--texts-of-a-call", type=int, default=4)
    parser.add_argument("--text-len", type=int, default=32, help="tokens of a text")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--max-token-id", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    assert arguments.chat_rate < inf, "loads of a rate"
    loads, started = loads_of(arguments), time.monotonic()
    rounds = []
    for _ in range(arguments.rounds):
        alone = {}
        for kind in KINDS:
            alone |= asyncio.run(measured(arguments.url, {kind: loads[kind]}))
        together = asyncio.run(measured(arguments.url, loads))
        rounds.append({"alone": alone, "together": together})
    ratios = {
        kind: percentile([one["together"][kind]["p99"] / one["alone"][kind]["p99"] for one in rounds], 50)
        for kind in KINDS
    }
    document = {"benchmark": "mixed_load", "p99_together_over_alone": ratios, "rounds": rounds}
    print(json.dumps({**document, **vars(arguments), "took": time.monotonic() - started, "machine": machine_facts()}))


if __name__ == "__main__":
    main()
