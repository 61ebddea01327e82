"""`tokenmill replay FILE`: drives the real scheduler from a step log and checks that it decides the same again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenmill.cli.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Replay a log; 0 when every plan is identical, 1 with the first difference otherwise.

    Raises:
        TokenMillError: the file is no step log.
    """
    parser = Parser("replay", "Drive the scheduler from a step log (serve --step-log FILE), without a model.")
    parser.add_argument("file", type=Path, metavar="FILE", help="a step log")
    path = parser.parse(arguments).file
    from tokenmill.engine.replay import replay

    outcome = replay(path)
    if outcome.difference is not None:
        print(f"after {outcome.num_plans} identical plans: {outcome.difference}")
        return 1
    print(f"{outcome.num_plans} plans, all identical")
    return 0
