"""Encoders that are not in transformers on native kernels: near the formulas, with the same bits in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.models.test_encoders import texts_of
from tests.model.models.test_native_decoder import load, native_attention, relative_errors
from tests.paging import PagedRequests, in_arrays
from tests.remote_encoders import REMOTE_ENCODERS, RemoteOracle, make_remote_encoder
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.host_decoder import HostDecoder
from tokenmill.model.models.native_decoder import NativeDecoder, native_pass_obstacle
from tokenmill.model.quantization.packed import ENCODER_INT8, QUANTIZATIONS, UNQUANTIZED

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

# Why a step of the family is no single call; None: it is one.
OBSTACLES = {"jina_v2": None, "jina_v2_code": "its attention is normed twice", "nomic_moe": "its experts have no gates"}
SHAPES: dict[str, dict[str, Any]] = {
    "jina_v2": {"hidden_size": 96, "num_attention_heads": 3, "max_position_embeddings": 1100},
    "jina_v2_code": {"hidden_size": 96, "num_attention_heads": 6, "max_position_embeddings": 1100},
    "nomic_moe": {"n_embd": 64, "n_head": 4, "n_inner": 96, "max_trained_positions": 1100},
}


def states_of(
    family: str, model: tuple[Decoder, Any], texts: list[list[int]], rng: np.random.Generator
) -> list[torch.Tensor]:
    """The hidden states of whole texts that share a step, in one call too where there is one."""
    requests = PagedRequests(texts, 16, rng)
    attention = native_attention(model, requests)
    for tensor in attention.kv.tensors:
        tensor[...] = 0x7FC0  # NaN, wherever nothing is written
    batch = in_arrays(requests.batch([(number, len(text)) for number, text in enumerate(texts)]))
    found = HostDecoder(model[0]).forward(batch, attention)
    assert native_pass_obstacle(model[0], "native") == OBSTACLES[family]
    if OBSTACLES[family] is None:
        assert np.array_equal(NativeDecoder(model[0], attention).forward(batch, attention), found)
    return [tensor.float() for tensor in tensor_over(found).split([len(text) for text in texts])]


@pytest.mark.parametrize("family", REMOTE_ENCODERS)
def test_hidden_states_stay_near_the_formulas(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**31))
    folder = make_remote_encoder(tmp_path, family, seed=seed, dtype=torch.bfloat16, **SHAPES[family])
    texts = texts_of([1, *rng.integers(1, 63, 4).tolist(), 700], rng)
    got = torch.cat(states_of(family, load(folder, UNQUANTIZED, 1), texts, rng))
    want, rounded = (
        torch.cat([RemoteOracle(folder, dtype).states(text).float() for text in texts])
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours, theirs = relative_errors(got, want), relative_errors(rounded, want)
    # A token whose scores of two experts are close may be sent to the other one: the worst row tells nothing then.
    assert ours.median() < 1.5 * theirs.median()
    assert ours.quantile(0.9) < 2 * theirs.quantile(0.9)


FORMATS = {"none": UNQUANTIZED, "int8": ENCODER_INT8, "stored in int8": QUANTIZATIONS["int8"]}


@pytest.mark.parametrize("stored", ["int8", "stored in int8"])
@pytest.mark.parametrize("family", REMOTE_ENCODERS)
def test_int8_stays_near_what_is_not_rounded(
    family: str, stored: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_remote_encoder(tmp_path, family, seed=int(rng.integers(2**31)), **SHAPES[family])
    texts, oracle = texts_of([5, 40], rng), RemoteOracle(folder)
    got = states_of(family, load(folder, FORMATS[stored], 1), texts, rng)
    least = 0.99 if family == "nomic_moe" else 0.999  # of which tokens are few, and each may meet another expert
    for text, found in zip(texts, got, strict=True):
        assert torch.cosine_similarity(found.mean(0), oracle.states(text).mean(0), dim=0) > least


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("family", REMOTE_ENCODERS)
def test_a_text_has_the_same_bits_alone_and_among_others(
    family: str, stored: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_remote_encoder(tmp_path, family, **SHAPES[family])
    alone, together = load(folder, FORMATS[stored], 1), load(folder, FORMATS[stored], 3)
    length = int(rng.integers(2, 62))
    for lengths in ([length] * 3, [length, 1, 37, 600, 2, 17]):
        texts = texts_of(lengths, rng)
        for text, found in zip(texts, states_of(family, together, texts, rng), strict=True):
            assert torch.equal(states_of(family, alone, [text], rng)[0], found)
