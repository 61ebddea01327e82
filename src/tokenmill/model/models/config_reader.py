"""Typed access to the fields of a config.json, with errors that name the file and the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import InvalidCheckpoint

# Sizes beyond it are garbage, and their products exceed what tensors can be asked for.
LARGEST = (1 << 31) - 1
_REQUIRED = object()


class ConfigReader:
    """A reader of one JSON object. A field that is absent or null takes the default; without one it is an error.

    Args:
        fields: the object.
        source: its name in error messages, e.g. the path of the file.
        defaults: values for fields that the object may leave out; they win over the defaults of the calls.
    """

    def __init__(self, fields: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None) -> None:
        self._fields = fields
        self.source = source
        self._defaults = defaults or {}

    def stated(self) -> ConfigReader:
        """Return a reader of the object alone, without the defaults."""
        return ConfigReader(self._fields, self.source)

    def without(self, *names: str) -> ConfigReader:
        """Return a reader of the object without these fields, whatever their defaults are."""
        fields = {name: value for name, value in self._fields.items() if name not in names}
        defaults = {name: value for name, value in self._defaults.items() if name not in names}
        return ConfigReader(fields, self.source, defaults)

    def renamed(self, names: Mapping[str, str], more: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of the object with other names for some of its fields, and with more fields."""
        fields = {names.get(name, name): value for name, value in self._fields.items()}
        return ConfigReader({**fields, **more}, self.source, self._defaults)

    def raw(self, name: str, default: Any = None) -> Any:
        """Return the field as it stands, unchecked."""
        value = self._fields.get(name)
        return self._defaults.get(name, default) if value is None else value

    def has(self, name: str) -> bool:
        """Return True if the object has the field, null or not."""
        return name in self._fields

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1, high: int = LARGEST) -> int:
        """Return an integer from `low` to `high`.

        Raises:
            InvalidCheckpoint: absent without a default, of another type, or out of range.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{name} must be an integer, got {value!r}")
        if value < low:
            raise self.error(f"{name} must be at least {low}, got {value}")
        if value > high:
            raise self.error(f"{name} must be at most {high}, got {value}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a finite number above 0.

        Raises:
            InvalidCheckpoint: absent without a default, of another type, or out of range.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} must be a number, got {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.error(f"{name} must be above 0, got {value}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            InvalidCheckpoint: of another type.
        """
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an integer or a list of them as a tuple; absent: empty.

        Raises:
            InvalidCheckpoint: of another type.
        """
        value = self.raw(name, [])
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in values):
            raise self.error(f"{name} must be an integer or a list of integers, got {value!r}")
        return tuple(values)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0.

        Raises:
            InvalidCheckpoint: absent, or of another type.
        """
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or not value:
            raise self.error(f"{name} must be a list of numbers, got {value!r}")
        return tuple(ConfigReader({name: one}, self.source).number(name) for one in value)

    def error(self, message: str) -> InvalidCheckpoint:
        """Return the error to raise, which names the source."""
        return InvalidCheckpoint(f"{self.source}: {message}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw(name, default)
        if value is _REQUIRED:
            raise self.error(f"{name} is missing")
        return value
