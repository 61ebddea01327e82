"""Encoders on native kernels: near transformers, the same bits in any company, one call or kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.encoder_checkpoints import ENCODERS, encoder_oracle, hidden_states, make_encoder
from tests.model.models.test_encoders import texts_of
from tests.model.models.test_native_decoder import load, native_attention, relative_errors
from tests.paging import PagedRequests, in_arrays
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.host_decoder import HostDecoder
from tokenmill.model.models.native_decoder import NativeDecoder, native_pass_obstacle
from tokenmill.model.quantization.packed import ENCODER_INT8, QUANTIZATIONS, UNQUANTIZED

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

FIELDS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 80},
    "roberta": {"hidden_size": 64, "num_attention_heads": 4, "hidden_act": "gelu_new"},
    "modernbert": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "nomic_bert": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "gte": {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 80},
    "gemma3_text": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    "jina_v3": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "xlm_roberta": {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 333, "hidden_act": "silu"},
}


def states_of(model: tuple[Decoder, Any], texts: list[list[int]], rng: np.random.Generator) -> list[torch.Tensor]:
    """The hidden states of whole texts that share a step, by one call; the same bits come kernel by kernel."""
    requests = PagedRequests(texts, 16, rng)
    attention = native_attention(model, requests)
    for tensor in attention.kv.tensors:
        tensor[...] = 0x7FC0  # NaN, wherever nothing is written
    assert native_pass_obstacle(model[0], "native") is None
    batch = in_arrays(requests.batch([(number, len(text)) for number, text in enumerate(texts)]))
    found = NativeDecoder(model[0], attention).forward(batch, attention)
    assert np.array_equal(found, HostDecoder(model[0]).forward(batch, attention))
    return [tensor.float() for tensor in tensor_over(found).split([len(text) for text in texts])]


@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_stay_near_transformers(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    fields = FIELDS[family]
    folder = make_encoder(tmp_path, family, seed=int(rng.integers(2**31)), dtype=torch.bfloat16, **fields)
    texts = texts_of([1, *rng.integers(1, 63, 8).tolist()], rng)
    got = torch.cat(states_of(load(folder, UNQUANTIZED, 1), texts, rng))
    oracles = [encoder_oracle(folder, dtype) for dtype in (torch.float32, torch.bfloat16)]
    want, rounded = (torch.cat([hidden_states(oracle, text).float() for text in texts]) for oracle in oracles)
    ours, theirs = relative_errors(got, want), relative_errors(rounded, want)
    assert ours.median() < 1.5 * theirs.median()
    assert ours.max() < 2 * theirs.max()


FORMATS = {"none": UNQUANTIZED, "int8": ENCODER_INT8, "stored in int8": QUANTIZATIONS["int8"]}


@pytest.mark.parametrize("stored", ["int8", "stored in int8"])
@pytest.mark.parametrize("family", ENCODERS)
def test_int8_stays_near_what_is_not_rounded(
    family: str, stored: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_encoder(tmp_path, family, seed=int(rng.integers(2**31)), **FIELDS[family])
    texts = texts_of([5, 40], rng)
    got = states_of(load(folder, FORMATS[stored], 1), texts, rng)
    oracle = encoder_oracle(folder)
    for text, found in zip(texts, got, strict=True):
        # Norms behind its blocks, here of random weights, magnify what int8 costs in each of seven layers.
        least = 0.97 if family == "gemma3_text" else 0.999
        assert torch.cosine_similarity(found.mean(0), hidden_states(oracle, text).mean(0), dim=0) > least


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("family", ENCODERS)
def test_a_text_has_the_same_bits_alone_and_among_others(
    family: str, stored: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_encoder(tmp_path, family, **FIELDS[family])
    alone, together = load(folder, FORMATS[stored], 1), load(folder, FORMATS[stored], 3)
    length = int(rng.integers(2, 62))
    for lengths in ([length] * 3, [length, 1, 37, 60, 2, 17]):
        texts = texts_of(lengths, rng)
        for text, found in zip(texts, states_of(together, texts, rng), strict=True):
            assert torch.equal(states_of(alone, [text], rng)[0], found)
