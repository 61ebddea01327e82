"""Handle flags of vLLM, SGLang and llama.cpp that are not ours, by the table in `foreign_flags.toml`.

The table is read only when such a flag is given.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tokenmill.core.errors import InvalidConfig

TABLE = Path(__file__).with_suffix(".toml")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llama_cpp": "llama.cpp"}
NEGATION = "--no-"
# The defaults of flags.
_UNSET = frozenset({"", "none", "null", "{}", "[]"})
_OFF, _ON = frozenset({"false", "0", "no", "off"}), frozenset({"true", "1", "yes", "on"})


class ForeignFlag(msgspec.Struct, frozen=True):
    """One flag of the table.

    Attributes:
        engines: the engines that have it.
        takes: "" for a switch, "=" for a value, "+" for several, "?" for a switch or one of `neutral`.
        neutral: values that change nothing.
        here: "same", "nothing", "refused", or the flag of ours that it stands for, perhaps with a value.
        because: the reason why it does nothing, or is refused.
        field: the key of the value in the JSON object that our flag takes; "": our flag takes the value itself.
        values: their values and ours, where these differ; empty: any value is ours.
    """

    name: str
    engines: tuple[str, ...]
    takes: str
    neutral: tuple[str, ...]
    here: str
    because: str
    field: str = ""
    values: Mapping[str, str] = msgspec.field(default_factory=dict)

    def replacement(self, values: list[str], is_negated: bool = False) -> tuple[list[str], str]:
        """Return our flags for this one with these values, and a message for the user; "": no message.

        Raises:
            InvalidConfig: it asks for a feature that we do not have.
        """
        ours = self.here if self.here.startswith("-") else ""
        if self.takes in ("", "?") and not (values and values[0] in self.neutral):
            given = values[0].lower() if values else "true"
            if given not in _OFF | _ON:
                raise InvalidConfig(f"{self.name} is a switch and takes no value")
            if (given in _ON) != is_negated:
                return ours.split(), "" if ours else self._without_effect(self.name)
            # Who does not ask for a thing changes nothing; the other way round only a plain switch has a meaning.
            return [_negated(ours)] if ours and " " not in ours else [], ""
        if not values or is_negated:
            raise InvalidConfig(f"{self.name} needs a value")
        if all(self._changes_nothing(value) for value in values):
            return [], ""
        return (self._ours(ours, values), "") if ours else ([], self._without_effect(f"{self.name} {' '.join(values)}"))

    def _ours(self, ours: str, values: list[str]) -> list[str]:
        if self.values and (unknown := [value for value in values if value not in self.values]):
            raise InvalidConfig(f"{self.name} {unknown[0]} is not supported; it can be {' or '.join(self.values)}")
        words = [self.values.get(value, value) for value in values]
        if not self.field:
            return [ours, *words]
        try:
            return [ours, json.dumps({self.field: json.loads(words[0])})]
        except ValueError:
            raise InvalidConfig(f"{self.name} {words[0]}: this is not a number") from None

    def _without_effect(self, given: str) -> str:
        if self.here != "refused":
            return f"{self.name} does nothing here: {self.because}"
        accepted = " or ".join(self.neutral)
        raise InvalidConfig(
            f"{given} is not supported, because {self.because}" + (f" ({accepted} changes nothing)" if accepted else "")
        )

    def _changes_nothing(self, value: str) -> bool:
        is_known = value.lower() in _UNSET or value in self.neutral
        return is_known or ("{}" in self.neutral and not _says_something(value))


def foreign_flags() -> dict[str, ForeignFlag]:
    """Return the whole table, by name."""
    found: dict[str, ForeignFlag] = {}
    for group in tomllib.loads(TABLE.read_text(encoding="utf-8"))["group"]:
        for key, engine in ENGINES.items():
            for word in group.get(key, "").split():
                name = word.rstrip("+").split("=")[0]
                neutral = word.partition("=")[2]
                has_it = (*found[name].engines, engine) if name in found else (engine,)
                takes = "+" if word.endswith("+") else "=" if "=" in word else ""
                if name.endswith("?"):
                    name, takes = name[:-1], "?"
                values = tuple(neutral.split("|")) if neutral else ()
                how = {"field": group.get("field", ""), "values": group.get("values", {})}
                found[name] = ForeignFlag(name, has_it, takes, values, group["here"], group.get("because", ""), **how)
    return found


def find(name: str, table: dict[str, ForeignFlag]) -> tuple[ForeignFlag | None, bool]:
    """Return the flag of a name as it was given (`--a` for `--a.b`), and whether the name negates it."""
    name = name.split(".", maxsplit=1)[0].replace("_", "-")
    if name in table:
        return table[name], False
    return (table.get("--" + name.removeprefix(NEGATION)), True) if name.startswith(NEGATION) else (None, False)


def _negated(switch: str) -> str:
    return "--" + switch.removeprefix(NEGATION) if switch.startswith(NEGATION) else NEGATION + switch[2:]


def _says_something(value: str) -> bool:
    """Return True if a JSON object, or vLLM's older `image=0,video=0`, has a value that is not 0, empty or false."""
    try:
        content = json.loads(value)
    except ValueError:
        content = dict(pair.partition("=")[::2] for pair in value.split(","))
        return any(part.strip() not in ("0", "") for part in content.values()) or "=" not in value
    return any(content.values()) if isinstance(content, dict) else bool(content)
