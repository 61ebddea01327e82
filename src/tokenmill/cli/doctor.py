"""`tokenmill doctor`: report what this machine has, what will be used of it and why, and what to fix."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Print the findings; returns 0 if all is well, 1 with the fix if something is wrong."""
    make_parser().parse(arguments)
    try:
        from tokenmill.startup.machine.doctor import doctor
    except ImportError as error:
        print(f"!! a package cannot be imported: {error}\n   mend: install TokenMill again, with what it needs")
        return 1
    if doctor(print):
        print("all is well")
        return 0
    print("something is wrong: see the lines `mend`")
    return 1


def make_parser() -> Parser:
    """Return the parser of `doctor`."""
    return Parser(
        "doctor", "Show what this machine has, what is used of it and why; exit code 1 if something needs mending."
    )
