"""The ladder of sizes, padding and fallbacks of decode graphs, with graphs that run their work on the CPU."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from tests.engine.runner.fake_platform import FakePlatform
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.runner.cuda_graphs import LARGEST, DecodeGraphs, ladder, shapes

PADDING = np.array([[-1, 7]], dtype=np.int64)


def doubled(inputs: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (inputs[:, 0] * 2, inputs.sum(1))


def make(max_rows: int, num_drafts: int = 0, **options: int) -> tuple[DecodeGraphs, FakePlatform]:
    platform = FakePlatform(**options)
    return DecodeGraphs(platform, platform.stream(), doubled, PADDING, max_rows, num_drafts), platform


def ones(inputs: np.ndarray) -> np.ndarray:
    """A token of each request."""
    return np.ones(len(inputs), dtype=np.int32)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 64, 100, 256, 511, 512, 5000])
def test_the_ladder_rises_to_the_most_and_pads_little(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, LARGEST)
    for n in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= n)
        assert size <= max(4, n + 7, 1.26 * n)


def test_all_sizes_are_captured_the_largest_first() -> None:
    graphs, platform = make(20)
    seen = []
    graphs.capture(lambda done, total: seen.append((done, total)))
    assert platform.captured == [20, 16, 8, 4, 2, 1]
    assert seen == [(done, 6) for done in range(7)]
    assert graphs.num_graphs == 6


def test_a_step_runs_in_the_smallest_size_that_holds_it(rng: np.random.Generator) -> None:
    graphs, platform = make(20)
    graphs.capture()
    for n in (1, 3, 4, 5, 9, 20, 2):
        inputs = rng.integers(0, 100, (n, 2))
        found = graphs.padded(inputs, ones(inputs))
        assert found is not None
        padded, starts = found
        assert starts is None
        size = len(padded)
        assert size == next(size for size in (1, 2, 4, 8, 16, 20) if size >= n)
        assert (padded[:n] == inputs).all()
        assert (padded[n:] == PADDING).all()
        first, second = graphs.run(torch.from_numpy(padded))
        assert torch.equal(first, torch.from_numpy(padded[:, 0] * 2))
        assert torch.equal(second, torch.from_numpy(padded.sum(1)))
    assert platform.replays == 7


def test_what_no_graph_holds_runs_without_one() -> None:
    graphs, _ = make(20)
    inputs = np.zeros((21, 2), dtype=np.int64)
    assert graphs.padded(inputs[:1], ones(inputs[:1])) is None, "nothing is captured yet"
    graphs.capture()
    assert graphs.padded(inputs, ones(inputs)) is None


def test_all_sizes_write_into_the_memory_of_the_largest(rng: np.random.Generator) -> None:
    graphs, _ = make(20)
    graphs.capture()
    found = {}
    for n in (1, 2, 4, 8, 16, 20):
        inputs = torch.from_numpy(rng.integers(0, 100, (n, 2)))
        outputs = graphs.run(inputs)
        assert [len(output) for output in outputs] == [n, n]
        assert torch.equal(outputs[1], inputs.sum(1))
        found[n] = [output.untyped_storage().data_ptr() for output in outputs]
    assert all(places == found[20] for places in found.values())
    assert len(set(found[20])) == 2, "logits and tokens each have their own"


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 5, 20])
@pytest.mark.parametrize("max_rows", [1, 3, 10, 256, 5000])
def test_there_are_shapes_for_a_few_numbers_of_drafts_and_for_all(max_rows: int, num_drafts: int) -> None:
    every = shapes(max_rows, num_drafts)
    largest = min(max_rows, LARGEST)
    assert [rows for rows, tokens in every if tokens == 1] == ladder(max_rows)
    assert {tokens for _, tokens in every} == {1, *(1 + min(count, num_drafts) for count in (2, 4, 8))}
    assert all(rows * tokens <= max(largest, tokens) for rows, tokens in every), "no more room than decodes need"
    sizes = [rows * tokens for rows, tokens in every]
    assert sizes == sorted(sizes)


def test_requests_with_drafts_stand_behind_each_other_and_padding_behind_them(rng: np.random.Generator) -> None:
    seen: list[list[int]] = []

    def work(inputs: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(starts.tolist())
        return (inputs.sum(1),)

    platform = FakePlatform()
    graphs = DecodeGraphs(platform, platform.stream(), work, PADDING, 64, 8)
    graphs.capture()
    print(f"captured {platform.captured}")
    assert platform.captured == sorted(platform.captured, reverse=True)
    kinds = set()
    for _ in range(300):
        lens = rng.integers(1, int(rng.integers(2, 10)), int(rng.integers(1, 12))).astype(np.int32)
        inputs = rng.integers(0, 100, (int(lens.sum()), 2))
        found = graphs.padded(inputs, lens)
        if found is None:
            assert len(inputs) > 64
            continue
        padded, starts = found
        assert (padded[: len(inputs)] == inputs).all()
        assert (padded[len(inputs) :] == PADDING).all()
        given = None if starts is None else torch.from_numpy(starts)
        assert torch.equal(graphs.run(torch.from_numpy(padded), given)[0], torch.from_numpy(padded.sum(1)))
        kinds.add(starts is None)
        if starts is None:
            # As many rows as there are tokens.
            assert seen[-1] == list(range(len(padded) + 1))
        else:
            rows = len(starts) - 1
            assert len(padded) <= 2 * len(inputs)
            assert len(padded) % rows == 0
            assert len(padded) // rows in (3, 5, 9)
            assert len(padded) // rows >= lens.max()
            own = np.diff(starts)
            assert own.tolist() == [*lens, *[1] * (rows - len(lens))]
            assert (starts[0], starts[-1] <= len(padded)) == (0, True)
            assert seen[-1] == starts.tolist()
    assert kinds == {True, False}


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("is_broken", [False, True])
def test_no_garbage_is_collected_while_graphs_are_captured(is_enabled: bool, is_broken: bool) -> None:
    seen = []

    def work(inputs: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(gc.isenabled())
        if is_broken:
            raise MemoryError
        return (inputs,)

    platform, was_enabled = FakePlatform(), gc.isenabled()
    graphs = DecodeGraphs(platform, platform.stream(), work, PADDING, 4)
    (gc.enable if is_enabled else gc.disable)()
    try:
        if is_broken:
            with pytest.raises(InvalidConfig, match="no memory is left for a CUDA graph of 4 rows"):
                graphs.capture()
        else:
            graphs.capture()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert seen
    assert not any(seen)


def test_a_full_memory_is_told_with_what_to_change() -> None:
    graphs, _ = make(20, memory_for_graphs=2)
    with pytest.raises(InvalidConfig, match=r"CUDA graph of 8 rows.*--enforce-eager"):
        graphs.capture()


def test_other_errors_of_a_capture_are_not_hidden() -> None:
    def broken(inputs: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise ValueError("a bug")

    platform = FakePlatform()
    with pytest.raises(ValueError, match="a bug"):
        DecodeGraphs(platform, platform.stream(), broken, PADDING, 2).capture()
