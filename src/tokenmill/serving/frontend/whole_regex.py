r"""Turn the regular expressions of JSON schemas, which are searched for, into ones that match a text as a whole.

    ^[a-c]+$    [a-c]+                  anchors at its ends are dropped
    ab|^c       .*(?:ab).*|(?:c).*      each alternative has anchors of its own
    a$|(^x)     None                    anchors elsewhere cannot be said without a search

Knows only brackets, escapes and classes of the expressions; a grammar's compiler reads the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ANY = "(?s:.*)"
_LONG_MONTH = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9])"
_DATE = f"[0-9]{{4}}-(?:{_LONG_MONTH}|{_SHORT_MONTH})"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_SHORT_IPV6 = "|".join(
    f"(?:{_GROUP}(?::{_GROUP}){{0,{left - 1}}})?::(?:{_GROUP}(?::{_GROUP}){{0,{6 - left}}})?" for left in range(1, 7)
)

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": r"P(?:[0-9]{1,9}[YMWD]|T[0-9]{1,9}[HMS])",
        "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
        "ipv6": f"(?:{_GROUP}:){{7}}{_GROUP}|{_SHORT_IPV6}",
        "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
        "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,32}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}",
        "uri": r"[a-z][a-z0-9+.-]{0,15}:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]{1,512}",
    }
)
"""By the name of a `format`: texts that have it, of some formats not all of them."""


def whole(pattern: str) -> str | None:
    """Return an expression of the texts in which a pattern is found; None: its anchors are elsewhere than at ends."""
    branches = []
    for branch in _branches(pattern):
        begins, ends = branch.startswith("^"), branch.endswith("$") and not _is_escaped(branch)
        inner = branch[1 if begins else 0 : len(branch) - 1 if ends else None]
        if _has_anchor(inner):
            return None
        branches.append(f"{'' if begins else _ANY}(?:{inner}){'' if ends else _ANY}")
    return "|".join(branches)


def _branches(pattern: str) -> list[str]:
    """Split at the bars that stand in no group and no class."""
    parts, depth = [""], 0
    for piece in _pieces(pattern):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _pieces(pattern: str) -> list[str]:
    """Split into escapes, whole classes and single characters."""
    pieces, at = list[str](), 0
    while at < len(pattern):
        end = at + 1
        if pattern[at] == "\\":
            end = at + 2
        elif pattern[at] == "[":
            end = _class_end(pattern, at)
        pieces.append(pattern[at:end])
        at = end
    return pieces


def _class_end(pattern: str, start: int) -> int:
    at = start + 1
    at += pattern[at : at + 1] == "^"
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _is_escaped(branch: str) -> bool:
    return _pieces(branch)[-1] != "$"


def _has_anchor(inner: str) -> bool:
    return any(piece in ("^", "$", "\\b", "\\B", "\\A", "\\Z", "\\z") for piece in _pieces(inner))
