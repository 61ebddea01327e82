"""`tokenmill version`: print what is installed, read from package metadata so that no package is imported."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.config.parser import Parser
from tokenmill.core.version import versions


def run(arguments: Sequence[str]) -> int:
    """Print one `name version` pair per line."""
    make_parser().parse(arguments)
    for name, version in versions().items():
        print(f"{name:<12} {version}")
    return 0


def make_parser() -> Parser:
    """Return the parser of `version`."""
    return Parser("version", "Print the versions of what is installed.")
