"""Encoders whose native pass is in float32: near transformers, and the same bits in any company, on every level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.encoder_checkpoints import ENCODERS, encoder_oracle, hidden_states, make_encoder
from tests.model.models.test_encoders import texts_of
from tests.model.models.test_native_decoder import native_attention
from tests.model.models.test_native_encoders import FIELDS
from tests.paging import PagedRequests, in_arrays
from tests.remote_encoders import RemoteOracle, make_remote_encoder
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.kernels.native import available_levels, load_kernels
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.models.native_decoder import NativeDecoder, float_pass_obstacle
from tokenmill.model.quantization.packed import FLOATS
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import load_model

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

JINA_V2: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 3, "max_position_embeddings": 1100}


class FloatEncoder:
    """An encoder in float32 on native kernels; `outputs`: of which tokens of a step, None: all."""

    def __init__(self, folder: Path, threads: int, level: str = "") -> None:
        self.native = load_kernels(threads, level)
        assert self.native is not None
        self.decoder = load_model(folder, read_architecture(folder), NativeKernels(self.native, FLOATS))

    def states(
        self, texts: list[list[int]], rng: np.random.Generator, outputs: list[int] | None = None
    ) -> list[torch.Tensor]:
        requests = PagedRequests(texts, 16, rng)
        attention = native_attention((self.decoder, self.native), requests)
        batch = in_arrays(requests.batch([(number, len(text)) for number, text in enumerate(texts)]))
        if outputs is not None:
            batch = msgspec.structs.replace(batch, output_indices=np.array(outputs, np.int64))
        found = NativeDecoder(self.decoder, attention).forward(batch, attention)
        assert found.dtype == np.float32
        split = [1] * len(outputs) if outputs is not None else [len(text) for text in texts]
        return list(torch.from_numpy(found).split(split))


def assert_near(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, atol=2e-4, rtol=2e-4)
    assert torch.cosine_similarity(found.mean(0), want.mean(0), dim=0) > 0.999999


@pytest.mark.parametrize("level", available_levels() or [])
@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_are_those_of_transformers(
    family: str, level: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_encoder(tmp_path, family, seed=int(rng.integers(2**31)), **FIELDS[family])
    texts, oracle = texts_of([1, *rng.integers(1, 63, 8).tolist()], rng), encoder_oracle(folder)
    for text, found in zip(texts, FloatEncoder(folder, 1, level).states(texts, rng), strict=True):
        assert_near(found, hidden_states(oracle, text))


@pytest.mark.parametrize("family", ENCODERS)
def test_a_text_has_the_same_bits_alone_and_among_others(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_encoder(tmp_path, family, **FIELDS[family])
    alone, together = FloatEncoder(folder, 1), FloatEncoder(folder, 3)
    length = int(rng.integers(2, 62))
    # More tokens than a chunk of the pass has.
    for lengths in ([length] * 3, [length, 1, 37, 60, 2, 17, *[62] * 4]):
        texts = texts_of(lengths, rng)
        for text, found in zip(texts, together.states(texts, rng), strict=True):
            assert torch.equal(alone.states([text], rng)[0], found)


def test_tokens_that_are_wanted_have_the_bits_that_they_have_among_all(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = FloatEncoder(make_encoder(tmp_path, "modernbert", **FIELDS["modernbert"]), 2)
    texts = texts_of([60, 5, 61, 62, 60, 33, 1], rng)
    every = torch.cat(model.states(texts, rng))
    wanted = sorted(rng.choice(len(every), 9, replace=False).tolist())
    assert torch.equal(torch.cat(model.states(texts, rng, wanted)), every[wanted])


def test_scores_fall_with_distance_in_long_texts(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_remote_encoder(tmp_path, "jina_v2", seed=int(rng.integers(2**31)), **JINA_V2)
    texts, oracle, alone = texts_of([700, 3], rng), RemoteOracle(folder), FloatEncoder(folder, 1)
    for text, found in zip(texts, FloatEncoder(folder, 2).states(texts, rng), strict=True):
        assert_near(found, oracle.states(text))
        assert torch.equal(alone.states([text], rng)[0], found)


def test_what_the_pass_does_not_know_is_named(tmp_path: Path) -> None:
    def obstacle(family: str, **fields: Any) -> str | None:
        folder: Path = make_remote_encoder(tmp_path / family, family, **fields)
        architecture: Architecture = read_architecture(folder)
        return float_pass_obstacle(architecture)

    assert obstacle("jina_v2", **JINA_V2) is None
    assert "norms" in str(obstacle("jina_v2_code", hidden_size=96, num_attention_heads=6))
    assert "experts" in str(obstacle("nomic_moe", n_embd=64, n_head=4, n_inner=96))
    odd = read_architecture(make_encoder(tmp_path / "odd", "bert", hidden_size=60, num_attention_heads=3))
    assert "multiple of 16" in str(float_pass_obstacle(odd))
