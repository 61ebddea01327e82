"""`tokenmill complete PROMPT`: stream one continuation to stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenmill.cli.model_access import add_access_flags, open_access, write_delta
from tokenmill.cli.sampling_flags import add_sampling_flags, sampling_fields
from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Complete and return 0.

    Raises:
        TokenMillError: the server refuses, or the local model cannot be loaded.
    """
    namespace = make_parser().parse(arguments)
    prompt = sys.stdin.read() if namespace.prompt == "-" else namespace.prompt
    model = open_access(namespace)
    if namespace.echo:
        write_delta(sys.stdout, prompt)
    for delta in model.complete(prompt, sampling_fields(namespace)):
        write_delta(sys.stdout, delta.text)
    print()
    return 0


def make_parser() -> Parser:
    """Return the parser of `complete`."""
    parser = Parser("complete", "Continue a text, streamed to stdout.", "PROMPT")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    parser.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    add_access_flags(parser)
    add_sampling_flags(parser)
    return parser
