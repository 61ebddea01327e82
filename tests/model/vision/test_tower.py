"""The tower and the position rule against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tokenmill.core.media import MediaSpan
from tokenmill.model.attention.media_turns import frequency_axes, prompt_positions
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.vision.tower import load_tower


def _spec(checkpoint: Path) -> VisionSpec:
    spec = read_vision(checkpoint)
    assert spec is not None
    return spec


@torch.no_grad()
@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (2, 10, 2), (2, 6, 16)])
def test_the_tower_is_that_of_transformers(
    checkpoint: Path, oracle: transformers.PreTrainedModel, grid: tuple[int, int, int], rng: np.random.Generator
) -> None:
    frames, rows, columns = grid
    pixels = rng.integers(0, 256, (frames, 16 * rows, 16 * columns, 3), dtype=np.uint8)
    tower = load_tower(checkpoint, _spec(checkpoint), TorchKernels("float32", "cpu"))
    found = tower.encode(torch.from_numpy(pixels))
    expected = oracle.model.visual(
        tower._patches(torch.from_numpy(pixels)), grid_thw=torch.tensor([[1, rows, columns]])
    )
    torch.testing.assert_close(found[:, 0], expected.pooler_output, rtol=1e-5, atol=1e-5)
    for level, features in enumerate(expected.deepstack_features):
        torch.testing.assert_close(found[:, 1 + level], features, rtol=1e-5, atol=1e-5)


def test_positions_are_those_of_transformers(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    spec = _spec(checkpoint)
    for _ in range(50):
        ids, spans, grids = [], [], []
        for _ in range(rng.integers(0, 4)):
            ids += [*rng.integers(0, 200, rng.integers(0, 5)).tolist(), spec.start_token_id]
            rows, columns = (2 * rng.integers(1, 6, 2)).tolist()
            length = rows * columns // 4
            spans.append(MediaSpan(len(ids), length, "", rows, columns, spec.image_token_id))
            grids.append([1, rows, columns])
            ids += [spec.image_token_id] * length + [spec.end_token_id]
        ids += rng.integers(0, 200, rng.integers(1, 5)).tolist()
        types = (torch.tensor([ids]) == spec.image_token_id).int()
        expected, delta = oracle.model.get_rope_index(
            torch.tensor([ids]), mm_token_type_ids=types, image_grid_thw=torch.tensor(grids) if grids else None
        )
        found, shift = prompt_positions(len(ids), spans, spec.merge)
        assert found.tolist() == expected[:, 0].tolist()
        assert shift == int(delta)


def test_frequencies_are_interleaved() -> None:
    assert frequency_axes((2, 1, 1), 6).tolist() == [0, 1, 2, 0, 0, 0]
    published = frequency_axes((24, 20, 20), 64)
    assert np.bincount(published).tolist() == [24, 20, 20]
