"""Fresh randomness in each run, with its seed in the captured output of a failure."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of this test; torch's own is seeded with the same number."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"{request.node.name}: seed {seed}")
    torch.manual_seed(seed)
    return np.random.default_rng(seed)
