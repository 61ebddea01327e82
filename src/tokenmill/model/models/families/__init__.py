"""The families, a file each: how config.json is read, what weights are called, and how GGUF files have them.

A file is found by standing here: `FAMILIES` of each module maps names in `architectures` of config.json to families.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from tokenmill.model.models.family import Family


def _families() -> dict[str, Family]:
    """Return the families of all modules of this package, by name."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        found |= importlib.import_module(f"{__name__}.{module.name}").FAMILIES
    return dict(sorted(found.items()))


FAMILIES: Mapping[str, Family] = MappingProxyType(_families())
