"""`tokenmill fit LOG...`: fit the time of steps to step logs, for `tokenmill simulate` and `tokenmill plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Fit, write and describe the model; returns 0.

    Raises:
        TokenMillError: a file is no step log, there are too few steps, or the model cannot be written.
    """
    namespace = make_parser().parse(arguments)
    from tokenmill.lab.simulate.fitting import write_model

    write_model(namespace.logs, Path(namespace.output))
    return 0


def make_parser() -> Parser:
    """Return the parser of `fit`."""
    parser = Parser("fit", "Fit the time of a step to step logs (serve --step-log FILE).", "LOG...")
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="step logs of one machine, model and flags")
    parser.add_argument(
        "-o", "--output", default="steps.json", metavar="FILE", help="file for the step model (default: %(default)s)"
    )
    return parser
