"""One checkpoint and its oracle for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.vision_checkpoints import load_vision_oracle, make_vision_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    return load_vision_oracle(checkpoint)
