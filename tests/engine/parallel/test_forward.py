"""Ranks together have the bits of one alone: every family, form of the weights, batch and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.parallel.threads import Form, ranks
from tests.model.models.test_native_decoder import FORMATS
from tests.paging import PagedRequests, in_arrays, random_schedule
from tests.tiers import pairs
from tokenmill.engine.parallel.layout import StepShape
from tokenmill.engine.runner.model import Model
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.host_model import on_host
from tokenmill.model.quantization.packed import PackedFormats
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import load_model
from tokenmill.platform.tensor_memory import array_of

needs_native = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

# Query heads 8, KV heads 4, 2 and 1, tied and not; biases, windows, multipliers, experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 4},
    "qwen2": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9},
    "granite": {"num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True, "mlp_bias": True},
    "smollm3": {"num_key_value_heads": 1, "head_dim": 16, "use_sliding_window": True, "sliding_window": 20},
    "qwen3_moe": {"num_key_value_heads": 2, "attention_bias": True, "norm_topk_prob": True},
    "gemma3": {"num_key_value_heads": 2, "head_dim": 16, "layer_types": None},
    "gemma4_moe": {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "layer_types": None},
    "phi3": {"num_key_value_heads": 4, "hidden_size": 256},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 16, "layer_types": None},
    "arcee": {"num_key_value_heads": 2, "head_dim": 16, "mlp_bias": True},
}


def checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **more: int) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, **FAMILIES.get(family, {}), **more}
    return make_checkpoint(folder, family, tokenizer=False, dtype=dtype, **shape)


def native_form(stored: PackedFormats, rng: np.random.Generator) -> Form:
    kv_dtype = torch.int8 if rng.random() < 0.3 else None
    return Form(lambda: select_kernels("native", "cpu", "bfloat16", 1, stored)[0], "native", kv_dtype)


def compare(
    folder: Path, form: Form, size: int, rng: np.random.Generator, is_exact: bool = True, num_stages: int = 1
) -> None:
    lengths = rng.integers(1, 90, 6).tolist()
    requests = PagedRequests([rng.integers(0, 331, length).tolist() for length in lengths], 16, rng)
    kernels = form.make()
    decoder = load_model(folder, read_architecture(folder), kernels)
    attention = form.attend(decoder, kernels, requests.num_pages)
    alone = on_host(decoder, attention)
    with ranks(folder, size, form, requests.num_pages, StepShape(6 * 40, 6, 8), num_stages) as (together, own):
        for chunks in random_schedule(lengths, 40, rng):
            batch = requests.batch(chunks)
            kept = np.sort(rng.permutation(len(batch.token_ids))[: rng.integers(0, len(batch.token_ids) + 1)])
            batch = in_arrays(msgspec.structs.replace(batch, output_indices=torch.from_numpy(kept)))
            want, got = alone.forward(batch, attention), together.forward(batch, own)
            if is_exact:
                assert np.array_equal(got, want), f"{chunks}, outputs {kept.tolist()}"
                assert np.array_equal(together.logits(got), alone.logits(want)), f"{chunks}: logits"
                assert np.array_equal(together.argmax(got), alone.argmax(want)), f"{chunks}: best tokens"
            else:
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(together.logits(got), alone.logits(want), rtol=1e-4, atol=1e-4)


def whole(folder: Path, form: Form) -> Model:
    """The model that one rank has alone."""
    kernels = form.make()
    decoder = load_model(folder, read_architecture(folder), kernels)
    return on_host(decoder, form.attend(decoder, kernels, 4))


@needs_native
@pytest.mark.parametrize(("family", "stored"), pairs(list(FAMILIES), list(FORMATS)))
def test_native_ranks_have_the_bits_of_one(family: str, stored: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = checkpoint(tmp_path, family)
    for size in (2, 4):
        compare(folder, native_form(FORMATS[stored], rng), size, rng)


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_native_stages_have_the_bits_of_one(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = checkpoint(tmp_path, family, num_hidden_layers=4)
    for size, num_stages in ((1, 2), (1, 4), (2, 3)):
        form = native_form(FORMATS[rng.choice(list(FORMATS))], rng)
        compare(folder, form, size, rng, num_stages=num_stages)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "granite", "olmo2"])
def test_stages_in_float32_have_the_bits_of_one_too(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = checkpoint(tmp_path, family, torch.float32, num_hidden_layers=3)
    compare(folder, Form(lambda: TorchKernels("float32", "cpu"), "cpu"), 1, rng, num_stages=3)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "granite"])
def test_ranks_in_float32_differ_from_one_by_the_rounding_of_their_sums(
    family: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """torch's products choose the order of their sums by the shape of a matrix."""
    folder = checkpoint(tmp_path, family, torch.float32)
    compare(folder, Form(lambda: TorchKernels("float32", "cpu"), "cpu"), 2, rng, is_exact=False)


@needs_native
def test_the_best_token_is_the_first_of_equal_ones_and_none_where_a_logit_is_no_number(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = checkpoint(tmp_path, "qwen3")
    form = native_form(FORMATS["bf16"], rng)
    alone = whole(folder, form)
    with ranks(folder, 4, form, 4, StepShape(16, 2, 2)) as (together, _):
        outputs = torch.randn(7, 64).bfloat16()
        outputs[1] = 0  # all logits are equal
        outputs[2, 3] = float("nan")
        outputs[3, 5] = float("inf")
        outputs[4] = outputs[5]
        hidden = array_of(outputs)
        assert np.array_equal(together.argmax(hidden), alone.argmax(hidden))
        assert together.argmax(hidden)[1:4].tolist() == [0, -1, -1]
        assert np.array_equal(together.logits(hidden), alone.logits(hidden), equal_nan=True)


@needs_native
def test_more_outputs_than_the_head_takes_at_a_time(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.engine.parallel.layout.MOST_HEAD_ROWS", 5)
    folder = checkpoint(tmp_path, "llama")
    form = native_form(FORMATS["int8"], rng)
    alone = whole(folder, form)
    with ranks(folder, 2, form, 4, StepShape(16, 2, 2)) as (together, _):
        hidden = array_of(torch.randn(13, 64).bfloat16())
        assert np.array_equal(together.logits(hidden), alone.logits(hidden))
        assert np.array_equal(together.argmax(hidden), alone.argmax(hidden))
