"""`tokenmill steps FILE`: print a step log, or write it as JSONL, CSV or a trace for Perfetto."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Print or export; returns 0.

    Raises:
        TokenMillError: the file is no step log.
    """
    namespace = make_parser().parse(arguments)
    from tokenmill.engine.loop.step_log import read_log
    from tokenmill.lab.simulate.step_export import WRITERS

    header, records = read_log(namespace.file)
    WRITERS[namespace.format](sys.stdout, header, records)
    return 0


def make_parser() -> Parser:
    """Return the parser of `steps`."""
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
    return parser
