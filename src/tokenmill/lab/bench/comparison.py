"""Compare documents of `bench` with the first of them: ratios, verdicts, and differences in machine and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidConfig
from tokenmill.lab.bench.figures import Figure

# What a run measures of itself says nothing of how it was set up.
MEASURED = frozenset({"load_average", "peak_memory_bytes", "seconds"})


class Document(msgspec.Struct, frozen=True):
    """A document and the values that were read from it."""

    path: str
    content: Mapping[str, Any]
    title: str
    figures: Mapping[str, Figure]


def compare(documents: Sequence[Document]) -> dict[str, Any]:
    """Return figures by name, and differences in workload, engine, server and machine, in the documents' order.

    A figure's entry has `value`, `low` and `high`, and after the first document the `ratio` to it (None: that is 0),
    the `verdict`, which is `better`, `worse`, `equal`, or `within_spread` where the ranges overlap, and
    `spread_known`: both have a range. It is None where a document lacks the figure.
    """
    names = dict.fromkeys(name for document in documents for name in document.figures)
    differences: dict[str, list[Any]] = {}
    for part in ("benchmark", "workload", "engine", "server", "machine"):
        differences |= _differences(part, [document.content.get(part) for document in documents])
    return {
        "comparison": [{"file": document.path, "title": document.title} for document in documents],
        "figures": {name: _entries([document.figures.get(name) for document in documents]) for name in names},
        "differences": differences,
    }


def check_same_workload(documents: Sequence[Document], differences: Mapping[str, Sequence[Any]]) -> None:
    """Refuse to compare documents that measured different things.

    Raises:
        InvalidConfig: naming the first difference.
    """
    for name, values in differences.items():
        if name.partition(".")[0] in ("benchmark", "workload"):
            kind = "kinds" if name == "benchmark" else "workloads"
            other = next(place for place, value in enumerate(values) if value != values[0])
            raise InvalidConfig(
                f"{documents[0].path} and {documents[other].path} are of different {kind}: {name} is {values[0]!r} and "
                f"{values[other]!r}; --force compares them anyway"
            )


def _entries(figures: Sequence[Figure | None]) -> list[dict[str, Any] | None]:
    first, *others = figures
    return [_entry(first, None), *(_entry(figure, first) for figure in others)]


def _entry(figure: Figure | None, first: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    values = {"value": figure.value, "low": figure.low, "high": figure.high}
    return values if first is None else values | _outcome(first, figure)


def _outcome(first: Figure, second: Figure) -> dict[str, Any]:
    if first.value == second.value:
        verdict = "equal"
    elif first.overlaps(second):
        verdict = "within_spread"
    else:
        verdict = "better" if (second.value > first.value) == first.higher_is_better else "worse"
    ratio = second.value / first.value if first.value else None
    return {"ratio": ratio, "verdict": verdict, "spread_known": first.has_range and second.has_range}


def _differences(name: str, values: Sequence[Any]) -> dict[str, list[Any]]:
    """Return dotted name -> values, for each leaf that is not the same in all."""
    if all(value == values[0] for value in values):
        return {}
    if not all(isinstance(value, dict) for value in values):
        return {name: list(values)}
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for value in values for key in value):
        if key not in MEASURED:
            found |= _differences(f"{name}.{key}", [value.get(key) for value in values])
    return found
