"""Messages for unknown names: suggest a similar name, or accept one of vLLM's that asks for nothing.

vllm_names.json lists vLLM's names that do not exist here, each with the values, besides None, that ask for nothing and
so change nothing here (a checkpoint's code is never run, nothing is swapped out, sleep is always possible).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_NEGATIONS = frozenset({"no", "not", "disable", "disabled", "without", "skip", "ignore"})


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?`, or "" if no similar name has the same sense."""
    import difflib

    same_sense = [one for one in names if _is_negative(one) == _is_negative(name)]
    near = difflib.get_close_matches(name, same_sense, n=1, cutoff=0.65)
    return f"; did you mean {near[0]}?" if near else ""


def _is_negative(name: str) -> bool:
    """Return True if a name negates something; two negations, as in `--no-disable-log-stats`, cancel out."""
    return sum(part in _NEGATIONS for part in re.split(r"[-_\s]+", name.lower())) % 2 == 1


def refuse_unknown(kind: str, owner: str, given: tuple[str, Any], names: Iterable[str], error: type[Exception]) -> None:
    """Refuse a name outside `names`, unless it is one of vLLM's with a value that asks for nothing.

    Args:
        kind: field, argument or option.
        given: the name and its value.
        error: the exception to raise.
    """
    import msgspec

    name, value = given
    harmless = msgspec.json.decode(Path(__file__).with_name("vllm_names.json").read_bytes())[kind].get(name)
    if harmless is None:
        raise error(f"{owner} has no {kind} {name!r}{did_you_mean(name, names)}")
    if value is not None and harmless != "any" and value not in harmless:
        raise error(f"{owner}: {name}={value!r} is not supported")
