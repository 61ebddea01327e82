"""What was perhaps meant by a word that is not known."""

from __future__ import annotations

import re
from collections.abc import Collection

_NEGATIONS = frozenset({"no", "not", "disable", "disabled", "without", "skip"})


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """`; did you mean X?`, or nothing where no choice is near that does not say the opposite."""
    import difflib

    same_sense = [choice for choice in choices if _is_negative(choice) == _is_negative(word)]
    near = difflib.get_close_matches(word, same_sense, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _is_negative(word: str) -> bool:
    """Whether a name denies something: two denials, as in `--no-disable-log-stats`, are none."""
    return sum(part in _NEGATIONS for part in re.split(r"[-_\s]+", word.lower())) % 2 == 1
