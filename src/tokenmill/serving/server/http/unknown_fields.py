"""Take bodies with fields that this server does not know: another server's names are read, the rest is left out.

What is left out is named in the reply's header `x-tokenmill-ignored` and, once a minute, in the log. A field that looks
like one of ours misspelt is refused: leaving it out would change the answer. `--strict-fields` refuses all.
"""

from __future__ import annotations

import difflib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.http.dialects import DECISIVE, FOREIGN, SYNONYMS, own_fields

# Of one body; more are refused like a body of another kind.
MOST_FIELDS = 64
SECONDS_BETWEEN_LINES = 60.0
# Of the spelling of a known field, by difflib's ratio; `temprature` has 0.95, `top_a` 0.8.
LIKENESS = 0.85
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?$")
_STEP = re.compile(r"\.?(?P<key>[^.\[\]]+)|\[(?P<index>\d+)\]")

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Taken(msgspec.Struct, Generic[T], frozen=True):
    """A body that was read.

    Attributes:
        ignored: paths of the fields that were left out.
    """

    body: T
    ignored: tuple[str, ...] = ()


class UnknownFields:
    """The rule for fields that are not known, and the log of those that were left out.

    Args:
        is_strict: leave out nothing.
        clock: seconds, monotonic.
    """

    def __init__(self, is_strict: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_strict = is_strict
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._said = -SECONDS_BETWEEN_LINES

    def convert(self, given: Any, kind: type[T]) -> Taken[T]:
        """Convert a decoded body, which has an unknown field, into a struct without such fields.

        Raises:
            msgspec.ValidationError: something else is wrong with it, or too much is unknown.
            InvalidRequest: a field looks like one of ours misspelt.
        """
        ignored = _translate(given, kind)
        while True:
            try:
                return Taken(msgspec.convert(given, kind), tuple(ignored))
            except msgspec.ValidationError as error:
                path = _drop_unknown(given, str(error))
                if path is None or len(ignored) >= MOST_FIELDS:
                    raise
                ignored.append(path)

    def note(self, ignored: tuple[str, ...]) -> None:
        """Count fields that were left out, and name them in the log once a minute."""
        self._counts.update(re.sub(r"\[\d+\]", "[]", path) for path in ignored)
        now = self._clock()
        if self._counts and now - self._said >= SECONDS_BETWEEN_LINES:
            names = ", ".join(f"{name} ({count})" for name, count in self._counts.most_common(20))
            logger.warning("ignored in requests, unknown to this server: %s", names)
            self._counts.clear()
            self._said = now


def header_of(ignored: tuple[str, ...]) -> str:
    """Return paths as the value of a header: visible ASCII, at most 1,000 characters."""
    return ", ".join(re.sub(r"[^!-+\--~]", "?", path)[:100] for path in ignored)[:1000]


def _translate(given: Any, kind: Any) -> list[str]:
    """Rename what another server calls otherwise, in place; return the synonyms that had to give way.

    Raises:
        InvalidRequest: a field looks like one of ours misspelt.
    """
    if not isinstance(given, dict) or not issubclass(kind, msgspec.Struct):
        return []
    known, ignored = frozenset(kind.__struct_encode_fields__), []
    for name in [name for name in given if name not in known]:
        if name in SYNONYMS:
            fields = own_fields(name, given[name], known)
            has_own = name not in DECISIVE and any(given.get(field) is not None for field in fields or ())
            if fields is None or has_own:
                ignored.append(name)
            else:
                given.update(fields)
            del given[name]
        elif name not in FOREIGN and (near := difflib.get_close_matches(name[:64], known, 1, LIKENESS)):
            raise InvalidRequest(f"{name[:64]}: unknown field; did you mean {near[0]}?", name)
    return ignored


def _drop_unknown(given: Any, message: str) -> str | None:
    """Remove the field that msgspec's message calls unknown, in place; return its path, or None if there is no such."""
    match = _UNKNOWN.search(message)
    if match is None:
        return None
    holder, path, name = given, match["path"] or "", match["name"]
    for step in _STEP.finditer(path):
        key = step["key"] if step["key"] is not None else int(step["index"])
        try:
            holder = holder[key]
        except (KeyError, IndexError, TypeError):
            return None
    if not isinstance(holder, dict) or name not in holder:
        return None
    del holder[name]
    return f"{path}.{name}" if path else name
