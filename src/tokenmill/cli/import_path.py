"""Keep the current folder out of the modules that a command imports; children: see `ipc/python_child.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence


def without_current_folder(path: Sequence[str], python_path: str) -> list[str]:
    """Return `sys.path` without the current folder, if only an empty entry of PYTHONPATH has put it there.

    `PYTHONPATH=$PYTHONPATH:/plugins` has such an entry if the variable was unset. A folder that PYTHONPATH names, and
    one behind the standard library, which was installed there, stays.
    """
    entries = python_path.split(os.pathsep)
    if not python_path or "" not in entries:
        return list(path)
    try:
        folder = os.getcwd()
    except OSError:
        return list(path)  # it has been removed, so nothing can be in it
    standard_library = os.path.dirname(os.__file__)
    front = list(path).index(standard_library) if standard_library in path else 0
    if folder in (os.path.abspath(entry) for entry in entries if entry):
        return list(path)
    return [entry for entry in path[:front] if entry != folder] + list(path[front:])
