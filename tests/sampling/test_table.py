from __future__ import annotations

import dataclasses

import numpy as np
import torch

from tests.sampling.oracle import new_row
from tests.sampling.test_sampler import random_params
from tokenmill.sampling.batch import SamplingBatch
from tokenmill.sampling.table import SamplingTable
from tokenmill.sampling_params import SamplingParams


def flat(value: object) -> object:
    """A batch as plain values that compare."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: flat(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def test_a_reused_row_keeps_nothing_of_its_former_owner(rng):
    for _ in range(50):
        reused, fresh = SamplingTable(3, 100, "cpu"), SamplingTable(3, 100, "cpu")
        stops = tuple(rng.choice(100, size=3, replace=False).tolist())
        reused.set(new_row(1, random_params(rng, 100), seed=5, num_prompt=9, stop_ids=stops))
        newcomer = new_row(1, random_params(rng, 100), seed=6, num_prompt=4, stop_ids=stops[:1])
        reused.set(newcomer)
        fresh.set(newcomer)
        for position in (4, 10, 40):
            rows, positions = np.array([1]), np.array([position])
            assert flat(reused.batch(rows, positions)) == flat(fresh.batch(rows, positions))


def test_a_greedy_newcomer_on_a_reused_row_takes_the_short_way(rng):
    table = SamplingTable(1, 100, "cpu")
    table.set(
        new_row(0, SamplingParams(logit_bias={3: 5.0}, presence_penalty=1.0, min_tokens=4, logprobs=2), stop_ids=(1,))
    )
    table.set(new_row(0, SamplingParams(temperature=0.0)))
    batch = table.batch(np.array([0]), np.array([7]))
    assert batch.greedy is not None and batch.greedy.tolist() == [0]
    expected = SamplingBatch(size=1, only_argmax=True, greedy=batch.greedy, filtered_within_candidates=True)
    assert batch == expected


def test_rows_are_grouped_by_what_they_need():
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=500),
        SamplingParams(top_k=1000),
        SamplingParams(min_p=0.5, logit_bias={7: 500.0}),
        SamplingParams(top_k=1, logprobs=3),
    ]
    table = SamplingTable(8, 1000, "cpu")
    for row, one in enumerate(params):
        table.set(new_row(row, one))
    batch = table.batch(np.arange(8, dtype=np.int32), np.full(8, 3, dtype=np.int32))
    assert batch.greedy.tolist() == [0, 7]
    assert batch.plain.indices.tolist() == [1, 5]
    assert batch.filtered.indices.tolist() == [2, 3, 6]
    assert not batch.filtered_within_candidates
    assert batch.wide.indices.tolist() == [4]
    assert batch.bias.values.tolist() == [100.0], "clamped"
    assert batch.logprobs.counts == (3,)
    assert batch.penalties is None
    assert batch.banned is None
    assert table.batch(np.array([2]), np.array([3])).filtered_within_candidates


def test_the_order_of_a_batch_is_that_of_the_rows_given():
    table = SamplingTable(5, 1000, "cpu")
    for row in range(5):
        table.set(new_row(row, SamplingParams(temperature=0.5 + row / 10)))
    batch = table.batch(np.array([4, 0, 2]), np.array([3, 3, 3]))
    assert batch.plain.indices.tolist() == [0, 1, 2]
    np.testing.assert_allclose(batch.plain.temperature.numpy(), [0.9, 0.5, 0.7])
