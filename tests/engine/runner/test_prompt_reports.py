"""Vectors that stand for prompts: the numbers that torch gives, from the bits that native decoders give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmill.engine.runner.prompt_reports import _pool, _Row


def in_torch(chunks: list[torch.Tensor], pooling: str) -> bytes:
    """The vector as torch makes it."""
    total = None
    for chunk in chunks:
        own = chunk.double().sum(0)
        total = own if total is None else total + own
    vector = chunks[-1][-1].double() if pooling == "last" or total is None else total
    return (vector / vector.norm().clamp(min=1e-12)).float().numpy().tobytes()


def pooled(chunks: list[np.ndarray] | list[torch.Tensor], pooling: str) -> bytes:
    """The vector of a prompt that came in chunks."""
    row = _Row(sum(map(len, chunks)), None, pooling)
    vectors = [_pool(row, chunk, is_last=chunk is chunks[-1]) for chunk in chunks]
    assert all(vector is None for vector in vectors[:-1])
    assert vectors[-1] is not None
    return vectors[-1].astype("<f4").tobytes()


def chunks_of(seed: int, scale: float) -> list[torch.Tensor]:
    """Hidden states in bfloat16, of columns whose sizes lie 2 to the `scale` apart at most."""
    rng = np.random.default_rng(seed)
    width = int(rng.choice([1, 3, 64, 1000, 1024, 2560]))
    columns = np.exp2(rng.uniform(-scale / 2, scale / 2, width))
    sizes = rng.choice([1, 2, 15, 16, 17, 100, 300], size=rng.integers(1, 5))
    return [torch.from_numpy(rng.normal(size=(size, width)) * columns).bfloat16() for size in sizes]


# Sums of bfloat16 numbers in float64 are exact where these are of one size, as hidden states are. Else sums, and always
# lengths, may differ in the last of 53 bits, which reaches the last of 24 in one of some hundred million numbers: seeds
# are fixed.
@pytest.mark.parametrize("scale", [0.0, 8.0, 40.0])
@pytest.mark.parametrize("seed", range(12))
def test_vectors_have_the_bits_of_torch(seed: int, scale: float) -> None:
    chunks = chunks_of(seed, scale)
    bits = [chunk.view(torch.int16).numpy().view(np.uint16) for chunk in chunks]
    floats = [chunk.float().numpy() for chunk in chunks]
    for pooling in ("last", "mean"):
        want = in_torch(chunks, pooling)
        assert pooled(bits, pooling) == want
        assert pooled(floats, pooling) == want
        assert pooled(chunks, pooling) == want, "of a device"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_vector_of_no_numbers_says_so(value: float) -> None:
    outputs = np.ones((3, 8), dtype=np.float32)
    outputs[2, 5] = value
    for pooling in ("last", "mean"):
        vector = _pool(_Row(3, None, pooling), outputs, is_last=True)
        assert vector is not None and not np.isfinite(vector).all()


def test_a_vector_of_zeros_stays_one() -> None:
    assert not np.frombuffer(pooled([np.zeros((2, 4), dtype=np.uint16)], "mean"), "<f4").any()
