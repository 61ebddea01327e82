"""`tokenmill bench throughput | latency | serve | quality`: measurements, progress on stderr, JSON last on stdout;
`bench compare` sets such lines side by side, `bench steps` writes a step model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tokenmill.core.names import did_you_mean

KINDS = {
    "throughput": "tokens per second of an offline batch",
    "latency": "seconds of a prefill and of a decode step, by batch size and context",
    "serve": "what clients of a running server see under load",
    "quality": "what formats of weights and KV lose against float32, on a text",
    "steps": "the time of a step by its size, for simulate and plan",
    "compare": "documents that the others printed, side by side",
}


def run(arguments: Sequence[str]) -> int:
    """Run one kind of benchmark; returns the exit code.

    Raises:
        TokenMillError: a flag is out of range, the model cannot be loaded, the server does not answer.
    """
    kind = arguments[0] if arguments else ""
    if kind in ("-h", "--help"):
        print("usage: tokenmill bench KIND [flags]", "", *_list(), "", sep="\n")
        print("tokenmill bench KIND --help lists the flags of one.")
        return 0
    if kind not in KINDS:
        meant = f"unknown kind {kind!r}{did_you_mean(kind, KINDS)}; " if kind else ""
        print(f"tokenmill bench: {meant}say what to measure:", *_list(), sep="\n", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"tokenmill.lab.bench.{kind}").run(arguments[1:]))


def _list() -> list[str]:
    return [f"  {kind:<12}{purpose}" for kind, purpose in KINDS.items()]
