"""Change every schema in a JSON schema. Does not know which keywords hold schemas: each caller has its own `Places`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Schema = dict[str, Any]


class Places(msgspec.Struct, frozen=True):
    """The keywords under which schemas stand in a schema: as a value, in a list, or by name."""

    single: tuple[str, ...]
    lists: tuple[str, ...]
    named: tuple[str, ...]

    def __contains__(self, keyword: str) -> bool:
        return keyword in self.single or keyword in self.lists or keyword in self.named

    def changed(self, schema: Any, change: Callable[[Schema], Schema]) -> Any:
        """Return the schema with `change` made to every schema in it, the innermost first."""
        if not isinstance(schema, dict):
            return schema
        inner: Schema = {}
        for name, value in schema.items():
            if name in self.single:
                inner[name] = self.changed(value, change)
            elif name in self.lists and isinstance(value, list):
                inner[name] = [self.changed(one, change) for one in value]
            elif name in self.named and isinstance(value, dict):
                inner[name] = {key: self.changed(one, change) for key, one in value.items()}
            else:
                inner[name] = value
        return change(inner)
