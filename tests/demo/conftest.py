"""Puts the training example on the import path: its modules are scripts, not part of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_demo"


@pytest.fixture(scope="session", autouse=True)
def train_demo_on_path():
    """Import the example's modules for these tests only."""
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))
