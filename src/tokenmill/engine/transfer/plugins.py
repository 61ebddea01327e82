"""Sources that users provide, found by the name of an entry point or by `module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.transfer.protocol import SOURCE_PLUGINS, KVSource, SourceContext


def find_source(name: str) -> Callable[[SourceContext], KVSource]:
    """Return the callable that makes the source of this name.

    Raises:
        InvalidConfig: no source has this name, or its module cannot be imported.
    """
    try:
        found = _load(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(f"--kv-source {name}: cannot be imported: {error}; is its folder on PYTHONPATH?") from error
    if not callable(found):
        raise InvalidConfig(f"--kv-source must be an entry point of {SOURCE_PLUGINS} or module:name, got {name!r}")
    return cast(Callable[[SourceContext], KVSource], found)


def _load(name: str) -> Any:
    for entry in entry_points(group=SOURCE_PLUGINS, name=name):
        return entry.load()
    if ":" not in name:
        return None
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
