from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh randomness in each run; the seed stands in the captured output of a failure."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"{request.node.name}: seed {seed}")
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of small operations wait for one another's threads when other tests run beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
