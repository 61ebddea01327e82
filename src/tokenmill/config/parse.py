"""Parse text into the value of a config field: numbers, sizes, switches, lists, in flags, variables and files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, Field, fields
from typing import Any

import msgspec

from tokenmill.config.fields import Flag
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.names import did_you_mean

# No machine has more bytes than 99 digits count, and the largest float has 309.
_SIZE = re.compile(r"(\d{1,99}(?:\.\d{1,99})?)\s*(?:([kmgt])(ib|b)?)?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Setting(msgspec.Struct, frozen=True):
    """One config field that users may set.

    Attributes:
        kind: the field's type without `None`: str, int, float, bool or `tuple[str, ...]`.
        optional: None is a value too, which is decided later; `auto` means None, except for texts.
    """

    name: str
    kind: str
    optional: bool
    default: Any
    how: Flag

    @property
    def flag(self) -> str:
        """The spelling on the command line, `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    def read(self, text: str) -> Any:
        """Return the value that `text` stands for.

        Raises:
            InvalidConfig: one sentence, without the name of the flag.
        """
        if self.how.choices and text not in self.how.choices and not self._is_plugin(text):
            allowed = ", ".join(self.how.choices) + (" or module:name" if self.how.plugins else "")
            raise InvalidConfig(f"{text!r} is not one of {allowed}{did_you_mean(text, self.how.choices)}")
        if self.optional and self.kind != "str" and text.lower() == "auto":
            return None
        match self.kind:
            case "str":
                return text
            case "bool":
                return _read_switch(text)
            case "int":
                return parse_size(text) if self.how.size else _read_number(int, text)
            case "float":
                return _read_number(float, text)
            case _:
                return tuple(part for part in (part.strip() for part in text.split(",")) if part)

    def _is_plugin(self, text: str) -> bool:
        if not self.how.plugins:
            return False
        if ":" in text:
            return True
        from importlib.metadata import entry_points  # takes 15 ms to import, and few settings are a plug-in's

        return bool(entry_points(group=self.how.plugins, name=text))

    def convert_value(self, value: Any) -> Any:
        """Return the value that a typed value of a YAML file stands for.

        Raises:
            InvalidConfig: as `read`.
        """
        if value is None and self.optional:
            return None
        if isinstance(value, bool):
            if self.kind == "bool":
                return value
        elif isinstance(value, str | int | float):
            return self.read(str(value))
        elif isinstance(value, list) and self.how.repeat:
            return tuple(str(item) for item in value)
        elif isinstance(value, dict) and self.how.json:
            return (json.dumps(value),) if self.how.repeat else json.dumps(value)
        raise InvalidConfig(f"{value!r} is not {_NAMES[self.kind]}")


_NAMES = {"str": "a text", "int": "an integer", "float": "a number", "bool": "true or false"} | {
    "tuple[str, ...]": "a list of texts"
}


def settings(config_class: type) -> list[Setting]:
    """Return the settable fields of a config class, in the order of its definition."""
    return [_setting(entry) for entry in fields(config_class) if "flag" in entry.metadata]


def _setting(entry: Field[Any]) -> Setting:
    # Annotations are strings here (PEP 563); the config classes use only the few forms that `Setting.kind` names.
    annotation = str(entry.type)
    kind = annotation.removesuffix(" | None")
    assert kind in _NAMES, f"the type of config field {entry.name} has no reading: {annotation}"
    assert entry.default is not MISSING, f"config field {entry.name} has no default"
    return Setting(entry.name, kind, kind != annotation, entry.default, entry.metadata["flag"])


def parse_size(text: str) -> int:
    """Parse `32k`, `4GiB`, `1.5G` or `2048`: k, M, G, T are powers of 1024; with a plain `B` (`4GB`) powers of 1000.

    Raises:
        InvalidConfig: not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidConfig(f"{text!r} is not a size; write 2048, 32k or 4GiB")
    number, prefix, unit = match.group(1), (match.group(2) or "").lower(), (match.group(3) or "").lower()
    size = float(number) * (1000 if unit == "b" else 1024) ** _POWERS[prefix]
    if size != int(size):
        raise InvalidConfig(f"{text!r} is not a whole number")
    return int(size)


def parse_number(text: str) -> float:
    """Parse a finite number.

    Raises:
        InvalidConfig: not a finite number.
    """
    return _read_number(float, text)


def _read_switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise InvalidConfig(f"{text!r} is not a switch; write true or false")
    return _SWITCHES[text.lower()]


def _read_number(number: type[int] | type[float], text: str) -> int | float:
    kind = "an integer" if number is int else "a number"
    try:
        found = number(text)
    except ValueError:
        raise InvalidConfig(f"{text[:100]!r} is not {kind}") from None
    # `inf` and `nan` are floats, and numbers of nothing: NaN would pass each check that it is compared in.
    if isinstance(found, float) and not math.isfinite(found):
        raise InvalidConfig(f"{text[:100]!r} is not {kind}")
    return found
