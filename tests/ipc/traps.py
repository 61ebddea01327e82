"""A folder of modules that nobody has installed, under the names of all that is: each writes down that it was run."""

from __future__ import annotations

import random
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

# Before a name is looked for in folders, these are found in the interpreter itself.
_BUILT_IN = frozenset(sys.builtin_module_names) | {"tests"}


def lay_traps(folder: Path) -> Path:
    """Fill a folder with traps, modules and packages; returns the file that holds the names of those that ran."""
    folder.mkdir(exist_ok=True)
    marker = folder / "ran"
    code = f"with open({str(marker)!r}, 'a') as file:\n    file.write(__name__ + '\\n')\n"
    for name in sorted({*sys.stdlib_module_names, *packages_distributions(), "sitecustomize"} - _BUILT_IN):
        if not name.isidentifier():
            continue
        if random.random() < 0.3:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(code)
        else:
            (folder / f"{name}.py").write_text(code)
    return marker


def caught(marker: Path) -> list[str]:
    """Names of the traps that ran, each once."""
    return sorted(set(marker.read_text().split())) if marker.exists() else []
