"""`tokenmill doctor`: what this machine has, what will be used of it and why, and what to mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.cli.parser import Parser

if TYPE_CHECKING:
    from tokenmill.machine.doctor import Finding


def run(arguments: Sequence[str]) -> int:
    """Print the findings; 0 if all is well, 1 with the mend if something is wrong."""
    make_parser().parse(arguments)
    from tokenmill.machine.doctor import doctor

    if doctor(_say):
        print("all is well")
        return 0
    print("something is wrong: see the lines `mend`")
    return 1


def make_parser() -> Parser:
    """The parser of `doctor`."""
    return Parser("doctor", "What this machine has, what will be used of it and why; exit code 1 if it needs mending.")


def _say(finding: Finding) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    mark = "[bold red]!![/]" if finding.mend else "[green]ok[/]"
    console.print(f"{mark} [dim]{finding.name:<12}[/] {escape(finding.text)}", soft_wrap=True)
    if finding.mend:
        console.print(f"   [bold]{'mend':<12}[/] {escape(finding.mend)}", soft_wrap=True)
