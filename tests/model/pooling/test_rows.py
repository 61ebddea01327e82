"""Vectors that stand for prompts: of every mode, and with torch's bits from those that native decoders give."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.embedders import POOLING, unit
from tests.embedders import pooled as reference
from tests.seeding import seed_for
from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.core.pooling import PoolingParams, PoolMode
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.pooling.rows import PooledRows

SEED = seed_for(__name__)
NAMES = {mode: "lasttoken" if mode is PoolMode.LAST else mode.value for mode in PoolMode}


def in_torch(chunks: list[torch.Tensor], pooling: str) -> bytes:
    """The vector as torch makes it."""
    total = None
    for chunk in chunks:
        own = chunk.double().sum(0)
        total = own if total is None else total + own
    vector = chunks[-1][-1].double() if pooling == "last" or total is None else total
    return (vector / vector.norm().clamp(min=1e-12)).float().numpy().tobytes()


def plan_of(starts: list[int], counts: list[int]) -> StepPlan:
    """A step of one row for each of these chunks."""
    numbers = [np.array(one, np.int32) for one in (range(len(starts)), starts, counts, [0] * len(starts))]
    empty = np.zeros(0, np.int32)
    return StepPlan(0, (), ("",) * len(starts), *numbers, empty, empty, empty)


def pool_all(prompts: list[list[np.ndarray]] | list[list[torch.Tensor]], wanted: list[PoolingParams]) -> list[object]:
    """The vectors of prompts that come in chunks, a chunk of each in a step; of ill ones the failures."""
    rows, found = PooledRows(len(prompts)), dict[int, object]()
    for row, (chunks, params) in enumerate(zip(prompts, wanted, strict=True)):
        tokens = np.zeros(sum(map(len, chunks)), np.int32)
        rows.set(AdmittedRequest(row, "", tokens, len(tokens), SamplingParams(), (), 0, params))
    for step in range(max(map(len, prompts))):
        own = [(row, chunks) for row, chunks in enumerate(prompts) if step < len(chunks)]
        starts = {row: sum(map(len, chunks[:step])) for row, chunks in own}
        plan = plan_of(
            [starts.get(row, 0) for row in range(len(prompts))], [len(c[step]) if step < len(c) else 1 for c in prompts]
        )
        outputs, spans, end = [], {}, 0
        for row, chunks in own:
            first, last = rows.reads(row, starts[row], len(chunks[step])) or (0, 0)
            outputs.append(chunks[step][first:last])
            spans[row] = (end, end + last - first)
            end += last - first
        join = np.concatenate if isinstance(outputs[0], np.ndarray) else torch.cat
        vectors, failures = rows.pool(plan, spans, join(outputs))
        assert not found.keys() & vectors.keys(), "a prompt has one vector"
        found |= vectors | failures
    return [found[row] for row in range(len(prompts))]


def pooled(chunks: list[np.ndarray] | list[torch.Tensor], pooling: str) -> bytes:
    """The vector of a prompt that came in chunks."""
    (vector,) = pool_all([chunks], [PoolingParams(modes=(PoolMode(pooling),))])  # type: ignore[list-item]
    assert isinstance(vector, bytes)
    return vector


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
    for mode in PoolMode:
        if mode is PoolMode.CLS or (mode is PoolMode.MAX and value == -np.inf):
            continue  # of the first token, and of greater numbers
        (failure,) = pool_all([[outputs]], [PoolingParams(modes=(mode,))])
        assert "NaN or infinite" in failure.error, mode


def test_modes_are_those_of_sentence_transformers_in_whatever_batch_and_chunks() -> None:
    rng = random.Random(SEED)
    numbers = np.random.default_rng(SEED)
    for _ in range(20):
        width = int(numbers.integers(1, 40))
        prompts = [
            [
                numbers.normal(size=(int(size), width)).astype(np.float32)
                for size in numbers.integers(1, 9, rng.randint(1, 4))
            ]
            for _ in range(rng.randint(1, 6))
        ]
        wanted = []
        for chunks in prompts:
            chosen = set(rng.sample(list(PoolMode), rng.randint(1, 6)))
            first = rng.randrange(sum(map(len, chunks)))
            modes = tuple(mode for mode in PoolMode if mode in chosen)
            wanted.append(PoolingParams(modes=modes, first=first, normalizes=rng.random() < 0.5))
        together = pool_all(prompts, wanted)
        for chunks, params, found in zip(prompts, wanted, together, strict=True):
            assert pool_all([chunks], [params]) == [found], "alone it has the same bits"
            in_tensors = pool_all([[torch.from_numpy(chunk) for chunk in chunks]], [params])
            whole = np.concatenate(chunks).astype(np.float64)
            want = reference(whole, tuple(NAMES[mode] for mode in params.modes), params.first)
            for one in (found, *in_tensors):
                np.testing.assert_allclose(
                    np.frombuffer(one, "<f4"), unit(want) if params.normalizes else want, rtol=1e-5, atol=1e-6
                )
    assert list(POOLING) == list(NAMES.values())


def test_a_vector_of_zeros_stays_one() -> None:
    assert not np.frombuffer(pooled([np.zeros((2, 4), dtype=np.uint16)], "mean"), "<f4").any()
