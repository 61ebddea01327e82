"""`tokenmill replay FILE`: drive the real scheduler from a step log and check that it decides the same again, or with
`--policy` and `--admission` report what other policies would have decided.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenmill.config.parser import Parser

# Flag and field of the scheduler's config.
POLICIES = {
    "--policy": "policy",
    "--batch-policy": "batch_policy",
    "--admission": "admission",
    "--eviction-policy": "eviction_policy",
}


def run(arguments: Sequence[str]) -> int:
    """Replay a log; returns 0 if every plan is identical, else 1 with the first difference; 0 after a comparison.

    Raises:
        TokenMillError: the file is no step log, or there is no such policy.
    """
    namespace = make_parser().parse(arguments)
    if others := list(_others(namespace)):
        from tokenmill.lab.simulate.policies import compare, table

        print(table(compare(namespace.file, others)))
        return 0
    from tokenmill.lab.simulate.replay import replay

    outcome = replay(namespace.file)
    if outcome.difference is not None:
        print(f"after {outcome.num_plans} identical plans: {outcome.difference}")
        return 1
    print(f"{outcome.num_plans} plans, all identical")
    return 0


def make_parser() -> Parser:
    """Return the parser of `replay`."""
    parser = Parser("replay", "Drive the scheduler from a step log (serve --step-log FILE), without a model.", "FILE")
    parser.add_argument("file", type=Path, metavar="FILE", help="a step log")
    group = parser.add_argument_group("run the log under other policies; repeat a flag for several")
    for flag, field in POLICIES.items():
        group.add_argument(flag, dest=field, action="append", metavar="NAME", help=f"as serve --{_serve_flag(flag)}")
    return parser


def _serve_flag(flag: str) -> str:
    return "scheduling-policy" if flag == "--policy" else flag.removeprefix("--")


def _others(namespace: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Return every combination of the named policies."""
    given = {field: getattr(namespace, field) for field in POLICIES.values() if getattr(namespace, field)}
    if given:
        for names in itertools.product(*given.values()):
            yield dict(zip(given, names, strict=True))
