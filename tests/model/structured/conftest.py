from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without any sense: what makes its answers right is the grammar alone."""
    return make_checkpoint(tmp_path_factory.mktemp("structured") / "model")
