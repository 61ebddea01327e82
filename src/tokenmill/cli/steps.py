"""`tokenmill steps FILE`: prints a step log, or writes it as JSONL, CSV or a trace for Perfetto."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from tokenmill.cli.parser import Parser
from tokenmill.core.errors import InvalidConfig


def run(arguments: Sequence[str]) -> int:
    """Print or export; returns 0.

    Raises:
        TokenMillError: the file is no step log, or the output cannot be written.
    """
    namespace = make_parser().parse(arguments)
    from tokenmill.engine.step_log import read_log
    from tokenmill.simulate.step_export import WRITERS

    header, records = read_log(namespace.file)
    with _opened(namespace.output) as stream:
        WRITERS[namespace.format](stream, header, records)
    return 0


def make_parser() -> Parser:
    """The parser of `steps`."""
    parser = Parser("steps", "Print a step log (serve --step-log FILE), or export it.", "FILE")
    parser.add_argument("file", type=Path, metavar="FILE", help="a step log")
    formats = "text", "jsonl", "csv", "perfetto"
    parser.add_argument(
        "--format",
        choices=formats,
        default="text",
        metavar="{" + ",".join(formats) + "}",
        help="text: a line a step; jsonl: all of each record; csv: numbers; perfetto: a trace (default: text)",
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="write there instead of to stdout")
    return parser


@contextlib.contextmanager
def _opened(output: str | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    try:
        with open(output, "w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise InvalidConfig(f"cannot write {output}: {error.strerror}") from None
