from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.model.weights.starts import Start


@pytest.fixture
def start(tmp_path: Path, rng: np.random.Generator) -> Start:
    """A small random model, and no cache yet."""
    make_checkpoint(tmp_path / "model", "qwen3", seed=int(rng.integers(2**31)), tokenizer=False, dtype=torch.bfloat16)
    return Start(tmp_path)
