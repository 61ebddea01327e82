"""Find what users provide: by the name of an entry point of a package, or by `module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from tokenmill.core.errors import InvalidConfig


def find_plugin(flag: str, group: str, name: str) -> Any:
    """Return the object that a setting names; None: no entry point has this name, and it names no module.

    Args:
        flag: the setting that the name comes from, for errors.
        group: of entry points, such as `tokenmill.policies`.

    Raises:
        InvalidConfig: its module cannot be imported, or has no such object.
    """
    from importlib.metadata import entry_points  # takes 15 ms to import, and most starts have no plug-in

    try:
        for entry in entry_points(group=group, name=name):
            return entry.load()
        if ":" not in name:
            return None
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(f"{flag} {name}: cannot be imported: {error}; is its folder on PYTHONPATH?") from error


def find_class(flag: str, group: str, name: str, kind: type[Any]) -> type[Any]:
    """Return the class that a setting names, which derives from `kind` and lacks nothing.

    Args:
        flag, group: see `find_plugin`.

    Raises:
        InvalidConfig: no class has that name, its module cannot be imported, or it is of another kind, or not whole.
    """
    found = find_plugin(flag, group, name)
    if found is None:
        raise InvalidConfig(f"{flag} must be an entry point of {group} or module:Class, got {name!r}")
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise InvalidConfig(f"{flag} {name}: is not a class of the kind {kind.__name__}")
    if missing := ", ".join(sorted(getattr(found, "__abstractmethods__", ()))):
        raise InvalidConfig(f"{flag} {name}: the class lacks {missing}")
    return found
