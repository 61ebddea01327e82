from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random checkpoint of a few thousand parameters with a context of 512 tokens."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
