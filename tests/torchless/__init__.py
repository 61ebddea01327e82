"""The whole surface in processes where torch cannot be imported, beside the same processes where it can."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BLOCKED = Path(__file__).parent / "blocked"
# `rehearsal` runs these tests where torch can be imported.
WISH = os.environ.get("TORCHLESS", "")


def environment(is_blocked: bool = True, **settings: str) -> dict[str, str]:
    """The variables of a process, where torch can be imported or not."""
    folders = [str(BLOCKED)] if is_blocked and WISH != "rehearsal" else []
    folders += [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders), "PYTHONWARNINGS": "ignore"} | settings
