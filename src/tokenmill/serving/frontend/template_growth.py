"""Bound the sizes of results that template functions return, before they are made, where they outgrow their input.

Each function takes the input and the arguments of a call, and returns the most characters of its result, or a good
estimate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenmill.serving.frontend.template_budget import ITEM_CHARACTERS

Growth = Callable[[Any, Sequence[Any]], float]

# A piece of a text that is split is a text of its own.
_PIECE_CHARACTERS = 64
# Whatever is shorter may be split without a look.
_SHORT = 1 << 16
_NUMBER = re.compile(r"\d{5,}")
_NESTED_WIDTH = re.compile(r"\*|:[^{}]*\{")


def numbers(arguments: Iterable[Any]) -> int:
    """Return the largest whole number among arguments; 0 without any."""
    return max((one for one in arguments if isinstance(one, int)), default=0)


def width(value: Any, arguments: Sequence[Any]) -> float:
    """Bound a padded text."""
    return numbers(arguments)


def tabs(value: str, arguments: Sequence[Any]) -> float:
    """Bound a text whose tabs are replaced."""
    return len(value) + value.count("\t") * numbers(arguments)


def replaced(value: Any, arguments: Sequence[Any]) -> float:
    """Bound a text with replaced parts."""
    text, (old, new) = str(value), map(str, arguments[:2])
    return len(text) + text.count(old) * len(new)


def joined(value: str, arguments: Sequence[Any]) -> float:
    """Bound a list joined by a text."""
    items = arguments[0]
    return sum(len(one) + len(value) for one in items if isinstance(one, str)) if isinstance(items, list) else 0


def split(value: str, arguments: Sequence[Any]) -> float:
    """Bound the pieces of a text together."""
    if len(value) < _SHORT:
        return 0
    separator = arguments[0] if arguments and isinstance(arguments[0], str) and arguments[0] else None
    count = len(value) // 2 if separator is None else value.count(separator)
    return len(value) + _PIECE_CHARACTERS // ITEM_CHARACTERS * count


def formatted(value: Any, arguments: Sequence[Any]) -> float:
    """Bound a text with fields, whose widths are numbers in it or among the arguments."""
    text = str(value)
    written = max((int(one) for one in _NUMBER.findall(text)), default=0)
    return max(written, numbers(arguments) if _NESTED_WIDTH.search(text) else 0)


def translated(value: str, arguments: Sequence[Any]) -> float:
    """Bound a text whose characters are replaced by others."""
    table = arguments[0] if arguments and isinstance(arguments[0], dict) else {}
    return len(value) * max((len(one) for one in table.values() if isinstance(one, str)), default=1)


def indented(value: Any, arguments: Sequence[Any]) -> float:
    """Bound the indentation of a text."""
    by = max(numbers(arguments), max((len(one) for one in arguments if isinstance(one, str)), default=0))
    return (str(value).count("\n") + 1) * by


def listed(value: Any, arguments: Sequence[Any]) -> float:
    """Bound a number of lists, or lists of a number of items."""
    return ITEM_CHARACTERS * numbers(arguments)


def as_json(value: Any, arguments: Sequence[Any]) -> float:
    """Bound JSON whose lines are indented; this refuses more than 64 spaces, which no template needs."""
    return numbers(arguments) << 20


METHODS: dict[str, Growth] = {
    "center": width,
    "expandtabs": tabs,
    "format": formatted,
    "format_map": formatted,
    "join": joined,
    "ljust": width,
    "replace": replaced,
    "rjust": width,
    "rsplit": split,
    "split": split,
    "splitlines": split,
    "to_bytes": width,
    "translate": translated,
    "zfill": width,
}
FILTERS: dict[str, Growth] = {
    "batch": listed,
    "center": width,
    "format": formatted,
    "indent": indented,
    "replace": replaced,
    "slice": listed,
    "tojson": as_json,
}
