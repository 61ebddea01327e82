from __future__ import annotations

import msgspec
import numpy as np

from tests.model.sampling.oracle import new_row
from tests.model.sampling.test_sampler import random_params
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.sampling.draws import RECORD, Draw, Kind, pack, redraws
from tokenmill.model.sampling.state import SamplingMetadata, SamplingState


def flat(value: object) -> object:
    """Metadata as plain values that compare."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, msgspec.Struct):
        return {name: flat(part) for name, part in msgspec.structs.asdict(value).items()}
    return value


def test_a_reused_row_keeps_nothing_of_its_former_owner(rng):
    for _ in range(50):
        reused, fresh = SamplingState(3, 100), SamplingState(3, 100)
        stops = tuple(rng.choice(100, size=3, replace=False).tolist())
        reused.set(new_row(1, random_params(rng, 100), seed=5, num_prompt=9, stop_ids=stops))
        newcomer = new_row(1, random_params(rng, 100), seed=6, num_prompt=4, stop_ids=stops[:1])
        reused.set(newcomer)
        fresh.set(newcomer)
        for position in (4, 10, 40):
            rows, positions = np.array([1]), np.array([position])
            assert flat(reused.select(rows, positions)) == flat(fresh.select(rows, positions))


def columns(metadata: SamplingMetadata, *names: str) -> list[list[float]]:
    return [metadata.draws.view(RECORD)[:, 0][name].tolist() for name in names]


def test_a_greedy_newcomer_on_a_reused_row_takes_the_short_way():
    state = SamplingState(1, 100)
    state.set(
        new_row(0, SamplingParams(logit_bias={3: 5.0}, presence_penalty=1.0, min_tokens=4, logprobs=2), stop_ids=(1,))
    )
    state.set(new_row(0, SamplingParams(temperature=0.0)))
    metadata = state.select(np.array([0]), np.array([7]))
    assert metadata.only_argmax
    assert not metadata.needs_processing
    assert columns(metadata, "row", "position", "kind") == [[0], [7], [Kind.GREEDY]]


def test_rows_are_described_by_what_they_need():
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
    state = SamplingState(8, 1000)
    for row, one in enumerate(params):
        state.set(new_row(row, one))
    metadata = state.select(np.arange(8, dtype=np.int32), np.full(8, 3, dtype=np.int32))
    assert columns(metadata, "kind") == [[0, 1, 2, 2, 2, 1, 2, 0]]
    assert columns(metadata, "top_k")[0][4] == 500
    assert columns(metadata, "top_k")[0][5] == Draw().top_k, "no filter: that many tokens there are"
    assert metadata.bias is not None and metadata.bias.values.tolist() == [100.0], "clamped"
    assert metadata.logprobs is not None and metadata.logprobs.counts == (3,)
    assert metadata.penalties is None
    assert metadata.stops is None
    assert metadata.needs_processing
    drawn_only = state.select(np.array([2, 0]), np.array([3, 3]))
    assert not drawn_only.needs_processing
    assert not drawn_only.only_argmax


def test_the_order_of_draws_is_that_of_the_rows_given_and_a_row_may_come_again():
    state = SamplingState(5, 1000)
    for row in range(5):
        state.set(new_row(row, SamplingParams(temperature=0.5 + row / 10, logit_bias={row: 1.0}), seed=row))
    for _ in range(2):
        metadata = state.select(np.array([4, 0, 2, 4]), np.array([3, 3, 3, 4]))
        rows, positions, temperature, uniform = columns(metadata, "row", "position", "temperature", "uniform")
        assert (rows, positions) == ([4, 0, 2, 4], [3, 3, 3, 4])
        np.testing.assert_allclose(temperature, [0.9, 0.5, 0.7, 0.9])
        assert len(set(uniform)) == 4
        assert metadata.bias is not None and metadata.bias.indices.tolist() == [0, 1, 2, 3]
        assert metadata.bias.token_ids.tolist() == [4, 0, 2, 4]


def test_a_redraw_has_the_other_number_and_all_else_of_its_draw(rng):
    records = np.array([Draw(uniform=0.25, redraw=0.5, top_k=7, min_p=0.1)] * 3, dtype=RECORD)
    records["row"] = [4, 5, 6]
    again = redraws(pack(records), np.array([2, 0])).view(RECORD)[:, 0]
    assert again["uniform"].tolist() == [0.5] * 2
    assert records["uniform"].tolist() == [0.25] * 3
    others = [name for name in Draw._fields if name != "uniform"]
    assert again[others].tolist() == records[[2, 0]][others].tolist()
