"""Keep the anchors of documents: the place of a symbol, then its name, as `engine/loop/engine.py:1` `Engine.step`.

    python tools/anchors.py            # write the lines anew, print the length of each walk; 1 if a symbol is gone
    python tools/anchors.py --check    # write nothing; 1 if a symbol has moved, too

Paths are below src/tokenmill. Reads files only: nothing of the project is imported.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
SOURCE = TOP / "src" / "tokenmill"
WALKS = TOP / "docs" / "reading.md"
MOST_LINES = 900
ANCHOR = re.compile(r"`(?P<path>[\w/]+\.py):(?P<line>\d+)`(?P<space>\s+)`(?P<symbol>[\w.]+)`")
Symbol = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class GoneError(Exception):
    """A document names a file or a symbol that does not exist."""


@dataclass(frozen=True)
class Anchor:
    """A symbol that a document names, with the line that the document gives for it."""

    path: str
    line: int
    symbol: str

    @property
    def node(self) -> Symbol:
        """Find the symbol in the source. Raises GoneError if it is not there."""
        file = SOURCE / self.path
        if not file.is_file():
            raise GoneError(f"{self.path} does not exist; {self.symbol} has moved, or the document must change")
        found = symbols(file).get(self.symbol)
        if found is None:
            raise GoneError(f"{self.path} has no {self.symbol}: name the symbol that does its work now")
        return found

    @property
    def is_class(self) -> bool:
        """True if the symbol is a class."""
        return isinstance(self.node, ast.ClassDef)

    @property
    def lines(self) -> range:
        """The lines of the symbol's source, with its decorators."""
        node = self.node
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        return range(first, (node.end_lineno or first) + 1)


@cache
def symbols(file: Path) -> dict[str, Symbol]:
    """Return the classes, methods and functions of a file by their dotted names."""
    return dict(_symbols(ast.parse(file.read_text(encoding="utf-8")).body, ""))


def _symbols(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Symbol]]:
    # A property stands before its setter, which has the same name: the first one counts.
    for node in reversed(body):
        if isinstance(node, Symbol):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _symbols(node.body, f"{prefix}{node.name}.")


def anchors(text: str) -> list[Anchor]:
    """Return the anchors of a text, in order."""
    return [Anchor(found["path"], int(found["line"]), found["symbol"]) for found in ANCHOR.finditer(text)]


def rewritten(text: str) -> str:
    """Return a text with the lines where its symbols stand now. Raises GoneError if one is not there."""

    def replaced(found: re.Match[str]) -> str:
        line = Anchor(found["path"], int(found["line"]), found["symbol"]).node.lineno
        return f"`{found['path']}:{line}`{found['space']}`{found['symbol']}`"

    return ANCHOR.sub(replaced, text)


def walks(text: str) -> dict[str, list[Anchor]]:
    """Return the anchors of each section of a text that has some, by the section's title."""
    parts = (part.partition("\n") for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])
    return {title: found for title, _, section in parts if (found := anchors(section))}


def num_lines(stops: list[Anchor]) -> int:
    """Return how many lines of source these stops show, each line counted once."""
    return len({(stop.path, line) for stop in stops for line in stop.lines})


def main() -> int:
    """Write the lines of all documents anew, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a line is not up to date")
    only_checks = parser.parse_args().check
    faults = []
    for path in sorted((TOP / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        try:
            new = rewritten(text)
        except GoneError as gone:
            faults.append(f"docs/{path.name}: {gone}")
            continue
        if new != text and only_checks:
            faults.append(f"docs/{path.name}: symbols have moved; run python tools/anchors.py")
        elif new != text:
            path.write_text(new, encoding="utf-8")
    for title, stops in {} if faults else walks(WALKS.read_text(encoding="utf-8")).items():
        count = num_lines(stops)
        print(f"{count:4} of {MOST_LINES} lines  {title}")
        if count > MOST_LINES:
            faults.append(f"docs/{WALKS.name}: {title} has {count} lines; show less, or make the code shorter")
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
