"""An argparse parser that answers a mistake with the flag that was meant, in one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from tokenmill.config.arguments import Arguments
from tokenmill.config.parse import parse_number
from tokenmill.core.errors import InvalidConfig


class Parser(argparse.ArgumentParser):
    """Parses the flags of one verb. Abbreviated flags are refused: a flag added later would change their meaning.

    Attributes:
        repeatable: flags that take several values.
        is_engines: the verb takes the flags of an engine, and so also those of vLLM and SGLang.
    """

    def __init__(self, verb: str, description: str, positional: str = "") -> None:
        """Make the parser; `positional` is shown in the usage line beside the flags."""
        super().__init__(
            prog=f"tokenmill {verb}",
            usage=" ".join(filter(None, (f"tokenmill {verb}", positional, "[flags]"))),
            description=description,
            allow_abbrev=False,
            formatter_class=_WideHelp,
        )
        self.repeatable: set[str] = set()
        self.is_engines = False

    def error(self, message: str) -> NoReturn:
        """Print the mistake in one line and exit with code 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse a command line; refuse unknown flags by name.

        Raises:
            SystemExit: with code 2 on a mistake, with 0 after --help.
        """
        # Before argparse looks: it would take the value after an unknown flag for a positional and report that.
        try:
            given = Arguments(arguments, self._option_string_actions, self.repeatable, self.is_engines)
        except InvalidConfig as error:
            self.error(str(error))
        for note in given.notes:
            print(f"{self.prog}: {note}", file=sys.stderr)
        return self.parse_args(given.words)


def finite(text: str) -> float:
    """Read a flag's value as a number that is neither infinite nor NaN.

    Raises:
        ArgumentTypeError: not a finite number.
    """
    try:
        return parse_number(text)
    except InvalidConfig as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> float:
    """Read a flag's value as a number above 0, raising as `finite` does."""
    number = finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"it must be above 0, got {text}")
    return number


class _WideHelp(argparse.HelpFormatter):
    """Help with flags in a column wide enough for most of them; one line each where the terminal allows."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44)
