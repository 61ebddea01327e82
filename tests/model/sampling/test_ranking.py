from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.sampling.oracle import ranked
from tokenmill.model.sampling.ranking import finite, largest


def logits_with_ties(rng: np.random.Generator, rows: int, vocab_size: int) -> torch.Tensor:
    """Logits of which many are equal, as those of a bfloat16 model, with both zeros and huge values."""
    logits = torch.from_numpy(rng.normal(size=(rows, vocab_size))).to(torch.bfloat16).to(torch.float32)
    kind = torch.from_numpy(rng.integers(0, 40, size=(rows, vocab_size)))
    for value, number in ((0.0, 0), (-0.0, 1), (3.0e38, 2), (-3.4028234663852886e38, 3)):
        logits[kind == number] = value
    return logits


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 2047, 2048, 2049, 5003, 20000])
def test_largest_is_the_head_of_the_total_order(vocab_size, rng):
    logits = logits_with_ties(rng, 3, vocab_size)
    for count in {1, min(5, vocab_size), min(256, vocab_size), vocab_size}:
        values, ids = largest(logits, count)
        for row in range(3):
            expected = ranked(logits[row].numpy().astype(np.float64))[:count]
            assert ids[row].tolist() == expected.tolist()
            assert torch.equal(values[row], logits[row, ids[row]])


def test_finite_keeps_order_and_replaces_what_is_not_a_number():
    raw = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    values = finite(raw)[0]
    assert torch.isfinite(values).all()
    assert values[2] < values[3] < values[0] == values[1]
    assert torch.isnan(raw[0, 0]), "the raw logits stay as they are"
