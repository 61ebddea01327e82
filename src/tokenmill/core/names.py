"""What is said of a name that does not exist: what may have been meant, or that it is one of vLLM's.

vLLM's names that do not exist here stand in vllm_names.json, each with the values, besides None, that ask for nothing:
they change nothing here either (a checkpoint's code is never run, nothing is swapped out, one can always sleep).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_NEGATIONS = frozenset({"no", "not", "disable", "disabled", "without", "skip", "ignore"})


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no name is near that does not mean the contrary."""
    import difflib

    same_sense = [one for one in names if _is_negative(one) == _is_negative(name)]
    near = difflib.get_close_matches(name, same_sense, n=1, cutoff=0.65)
    return f"; did you mean {near[0]}?" if near else ""


def _is_negative(name: str) -> bool:
    """Whether a name denies something: two denials, as in `--no-disable-log-stats`, are none."""
    return sum(part in _NEGATIONS for part in re.split(r"[-_\s]+", name.lower())) % 2 == 1


def refuse_unknown(kind: str, owner: str, given: tuple[str, Any], names: Iterable[str], error: type[Exception]) -> None:
    """Refuse a name that is none of these, unless it is one of vLLM's with a value that asks for nothing.

    Args:
        kind: field, argument or option.
        given: the name and its value.
        error: what is raised.
    """
    import msgspec

    name, value = given
    harmless = msgspec.json.decode(Path(__file__).with_name("vllm_names.json").read_bytes())[kind].get(name)
    if harmless is None:
        raise error(f"{owner} has no {kind} {name!r}{did_you_mean(name, names)}")
    if value is not None and harmless != "any" and value not in harmless:
        raise error(f"{owner}: {name}={value!r} is not supported")
