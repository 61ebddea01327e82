"""The whole surface in processes where torch cannot be imported, beside the same processes where it can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BLOCKED = Path(__file__).parent / "blocked"
# Until the engine's code does without torch: `1` runs these tests, `rehearsal` runs them where torch can be imported.
WISH = os.environ.get("TORCHLESS", "")
until_the_cut = pytest.mark.skipif(not WISH, reason="TORCHLESS=1 runs it: the engine's code still imports torch")


def environment(is_blocked: bool = True, **settings: str) -> dict[str, str]:
    """The variables of a process, where torch can be imported or not."""
    folders = [str(BLOCKED)] if is_blocked and WISH != "rehearsal" else []
    folders += [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders), "PYTHONWARNINGS": "ignore"} | settings
