"""`tokenmill bench compare A.json B.json`: documents of `bench` side by side, each figure against that of the first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig
from tokenmill.lab.bench.comparison import Document, check_same_workload, compare
from tokenmill.lab.bench.figures import figures
from tokenmill.lab.bench.title import title

LONGEST_VALUE = 60


def run(arguments: Sequence[str]) -> int:
    """Compare and print the documents; returns 0, whichever is better.

    Raises:
        InvalidConfig: a file has no document of `bench`, or they measured different things.
    """
    parser = make_parser()
    namespace = parser.parse(arguments)
    if len(namespace.files) < 2:
        parser.error("give at least two files to compare")
    documents = [read_document(path) for path in namespace.files]
    comparison = compare(documents)
    if not namespace.force:
        check_same_workload(documents, comparison["differences"])
    print(json.dumps(comparison) if namespace.json else _text(comparison))
    return 0


def make_parser() -> Parser:
    """Return the parser of `bench compare`."""
    parser = Parser("bench compare", "Set documents of bench side by side; the first is what the others are held to.")
    parser.usage = "tokenmill bench compare FILE FILE ... [flags]"
    parser.add_argument("files", nargs="+", metavar="FILE", help="what bench printed: its last line, or all of a log")
    parser.add_argument("--force", action="store_true", help="compare different kinds and workloads anyway")
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON document")
    return parser


def read_document(path: str) -> Document:
    """Read the document in a file: all of it, or its last line that is not empty.

    Raises:
        InvalidConfig: the file cannot be read, or neither is a whole document of `bench`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"{path} is not text") from None
    found = _json_object(text) or _json_object(text.rpartition("\n")[2])
    if not found or found.get("benchmark") is None:
        raise InvalidConfig(f"{path}: neither it nor its last line is a document that tokenmill bench printed")
    try:
        return Document(path, found, title(found), {one.name: one for one in figures(found)})
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise InvalidConfig(f"{path}: its document of bench is not whole: {error!r}") from None


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(comparison: Mapping[str, Any]) -> str:
    paths = [document["file"] for document in comparison["comparison"]]
    titles = [document["title"] for document in comparison["comparison"]]
    names = [PurePath(path).name for path in paths]
    labels = names if len(set(names)) == len(names) else paths
    parts = (
        titles[:1] if len(set(titles)) == 1 else [f"{label}: {of}" for label, of in zip(labels, titles, strict=True)]
    )
    header = ["", labels[0], *(cell for label in labels[1:] for cell in (label, "ratio", ""))]
    parts += ["", *_columns([header, *(_row(name, entries) for name, entries in comparison["figures"].items())])]
    if differences := comparison["differences"]:
        rows = [[name, *map(_short, values)] for name, values in differences.items()]
        parts += ["", "They differ in", *_columns([["", *labels], *rows], justify=str.ljust)]
    return "\n".join([*parts, *_legend(comparison)])


def _row(name: str, entries: Sequence[dict[str, Any] | None]) -> list[str]:
    first, *others = entries
    cells = [name, _shown(name, first)]
    for entry in others:
        ratio = entry.get("ratio") if entry else None
        cells += [_shown(name, entry), "-" if ratio is None else f"{ratio:.3f}x", _words(entry)]
    return cells


def _words(entry: Mapping[str, Any] | None) -> str:
    """Format the verdict, with a question mark where chance alone may have made it."""
    if not entry or "verdict" not in entry:
        return ""
    doubtful = entry["verdict"] in ("better", "worse") and not entry["spread_known"]
    return str(entry["verdict"]).replace("_", " ") + "?" * doubtful


def _columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.rjust) -> list[str]:
    """Align the cells of rows; names and the words after a ratio are always flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            (str.ljust if place == 0 or (place > 1 and place % 3 == 1) else justify)(cell, width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _legend(comparison: Mapping[str, Any]) -> list[str]:
    words = {_words(entry) for entries in comparison["figures"].values() for entry in entries}
    lines = []
    if "within spread" in words:
        lines.append(
            "within spread: the ranges overlap (lowest to highest of the repeats, or 95% intervals from the requests), "
            "so the difference says nothing."
        )
    if words & {"better?", "worse?"}:
        lines.append("?: one value without a range: the effect of chance is unknown.")
    if "requests_per_second" in comparison["figures"]:
        lines.append("The ranges of a server's figures are of one run: at another moment it may differ by more.")
    return ["", *lines] if lines else []


def _shown(name: str, entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{entry['value'] / 2**20:,.1f} MiB"
    return f"{_number(entry['value'] * 1e3)} ms" if name.endswith("_seconds") else _number(entry["value"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
