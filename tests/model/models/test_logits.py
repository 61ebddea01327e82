"""Logits against transformers', for every family and feature, whole and in mixed paged batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import load_oracle, make_checkpoint, nudged
from tests.paging import PagedRequests, make_attention, random_schedule
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}
ONES = dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
SLIDING = {"use_sliding_window": True, "sliding_window": 7}


def gqa(ratio: int, kv_heads: int = 2) -> dict[str, int]:
    heads = ratio * kv_heads
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 gqa 1 tied odd vocabulary": ("qwen3", {**gqa(1), "tie_word_embeddings": True, "vocab_size": 333}),
    "qwen3 gqa 4 biases": ("qwen3", {**gqa(4), "attention_bias": True}),
    "qwen3 gqa 8": ("qwen3", gqa(8)),
    "qwen3 window from the first layer": ("qwen3", {**SLIDING, "max_window_layers": 1}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen2 biases": ("qwen2", gqa(2)),
    "qwen2 gqa 1 untied": ("qwen2", gqa(1)),
    "qwen2 gqa 8 tied": ("qwen2", {**gqa(8, 1), "tie_word_embeddings": True}),
    "qwen2 windows in some layers": ("qwen2", {**SLIDING, "max_window_layers": 2, "num_hidden_layers": 4}),
    "llama gqa 4 tied": ("llama", {**gqa(4), "tie_word_embeddings": True}),
    "llama gqa 8 odd vocabulary": ("llama", {**gqa(8), "vocab_size": 387}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16, "rms_norm_eps": 1e-5}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral gqa 4": ("mistral", gqa(4)),
    "mistral gqa 1 own head size": ("mistral", {**gqa(1), "head_dim": 6}),
    "mistral window": ("mistral", {"sliding_window": 9, "num_key_value_heads": 1}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "moe": ("qwen3_moe", {}),
    "moe normalized gqa 4": ("qwen3_moe", {**gqa(4), "norm_topk_prob": True, "num_experts_per_tok": 4}),
    "moe gqa 8 tied": ("qwen3_moe", {**gqa(8, 1), "tie_word_embeddings": True, "attention_bias": True}),
    "moe with dense layers": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "moe window": ("qwen3_moe", SLIDING),
    "smollm3 every fourth layer without rope": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3 listed ropes, biases": (
        "smollm3",
        {**gqa(4), "no_rope_layers": [0, 1, 1, 0, 0], "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3 without any rope": ("smollm3", {"no_rope_layers": [0] * 4, "num_key_value_heads": 4}),
    "smollm3 windows where no rope is": ("smollm3", {**SLIDING, "no_rope_layer_interval": 2}),
    "smollm3 listed windows": (
        "smollm3",
        {**SLIDING, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": ("granite", {}),
    "granite gqa 4 tied, biases": (
        "granite",
        {**gqa(4), "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "logits_scaling": 16},
    ),
    "granite attention multiplier alone": ("granite", {**ONES, "attention_multiplier": 0.05}),
    "granite embedding multiplier alone": ("granite", {**ONES, "embedding_multiplier": 12}),
    "granite residual multiplier alone": ("granite", {**ONES, "residual_multiplier": 0.22}),
    "granite logits scaling alone": ("granite", {**ONES, "logits_scaling": 8.5}),
    "gemma 3": ("gemma3", {}),
    "gemma 3 gqa 4 untied, biases": ("gemma3", {**gqa(4), "tie_word_embeddings": False, "attention_bias": True}),
    "gemma 3 every sixth layer full, both ropes": (
        "gemma3",
        {
            "num_hidden_layers": 7,
            "layer_types": None,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma 3 silu": ("gemma3", {"hidden_activation": "silu"}),
    "gemma 4": ("gemma4", {}),
    "gemma 4 without shared KV, cap and per-layer embeddings": (
        "gemma4",
        {
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "final_logit_softcapping": None,
            "hidden_size_per_layer_input": 0,
            "attention_bias": True,
        },
    ),
    "gemma 4 every sixth layer full, other KV heads there": (
        "gemma4",
        {
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 1,
            "layer_types": None,
            "per_layer_config": {layer: {"head_dim": 24, "num_key_value_heads": 1} for layer in (5, 7)},
        },
    ),
    "gemma 4 moe": ("gemma4_moe", {}),
    "gemma 4 moe gqa 4 untied, biases, KV heads as in other layers, every expert": (
        "gemma4_moe",
        {
            **gqa(4),
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attention_k_eq_v": False,
            "top_k_experts": 6,
            "final_logit_softcapping": None,
        },
    ),
    "gemma 4 moe with shared KV, wide blocks and per-layer embeddings": (
        "gemma4_moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 331,
        },
    ),
    "gemma 4 dense, values that are keys": (
        "gemma4_moe",
        {"enable_moe_block": False, "num_experts": None, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss gqa 4, listed windows": (
        "gpt_oss",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_hidden_layers": 4,
        },
    ),
    "gpt-oss without biases in attention": ("gpt_oss", {"attention_bias": False, "num_experts_per_tok": 1}),
    "olmo 2": ("olmo2", {}),
    "arcee": ("arcee", {}),
    "arcee gqa 4 tied, biases": (
        "arcee",
        {**gqa(4), "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo 2 gqa 4 tied, biases": ("olmo2", {**gqa(4), "tie_word_embeddings": True, "attention_bias": True}),
    "lfm 2": ("lfm2", {}),
    "lfm 2 gqa 4, conv of 4 with biases, numbers of layers, adjusted width": (
        "lfm2",
        {
            **gqa(4),
            "conv_bias": True,
            "conv_L_cache": 4,
            "layer_types": None,
            "full_attn_idxs": [0, 2],
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 20,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "lfm 2 moe": ("lfm2_moe", {}),
    "lfm 2 moe gqa 4, no bias, weights as they are, experts throughout": (
        "lfm2_moe",
        {**gqa(4), "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0, "conv_bias": True},
    ),
    "granite hybrid": ("granite_hybrid", {}),
    "granite hybrid dense gqa 4 tied, one group, no positions, no bias, chunks of 8": (
        "granite_hybrid",
        {
            **gqa(4),
            "num_local_experts": 0,
            "tie_word_embeddings": True,
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 8,
            "position_embedding_type": None,
        },
    ),
    "granite hybrid with all biases": (
        "granite_hybrid",
        {"attention_bias": True, "mamba_proj_bias": True, "mamba_expand": 3, "mamba_n_heads": 6},
    ),
    "granite hybrid of attention alone": (
        "granite_hybrid",
        {"layer_types": ["full_attention"] * 3, "num_local_experts": 0},
    ),
    "qwen 3.5": ("qwen3_5", {}),
    "qwen 3.5 gqa 4 tied, heads of their own sizes, every second layer": (
        "qwen3_5",
        {
            **gqa(4),
            "tie_word_embeddings": True,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 3,
            "layer_types": None,
            "full_attention_interval": 2,
        },
    ),
    "qwen 3.5 moe": ("qwen3_5_moe", {}),
    "qwen 3.5 moe gqa 4 tied, every second layer": (
        "qwen3_5_moe",
        {**gqa(4), "tie_word_embeddings": True, "layer_types": None, "full_attention_interval": 2},
    ),
    "qwen 3 next": ("qwen3_next", {}),
    "qwen 3 next, dense layers among sparse ones": (
        "qwen3_next",
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
    ),
    "phi 3, three quarters of each head turn": ("phi3", {}),
    "phi 3 gqa 4 tied, window": ("phi3", {**gqa(4), "tie_word_embeddings": True, "sliding_window": 11}),
    "smollm3 layers that slide, whatever the switch says": (
        "smollm3",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9},
    ),
    "phi 3 whole heads": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
}


@pytest.fixture(params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, rng: np.random.Generator) -> Path:
    family, overrides = CASES[request.param]
    return make_checkpoint(tmp_path, family, seed=int(rng.integers(2**31)), tokenizer=False, **overrides)


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_model(folder, read_architecture(folder), TorchKernels(dtype, "cpu"))


def assert_close(got: torch.Tensor, want: torch.Tensor, relative: float = 1e-4) -> None:
    """Every row within `relative` of its largest logit."""
    assert got.dtype == torch.float32
    assert (worst := difference(got, want)) <= relative, f"relative difference {worst:.2e}"


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference in a row beside its largest logit."""
    assert got.shape == want.shape
    return ((got - want).abs().amax(-1) / want.abs().amax(-1)).max().item()


@torch.inference_mode()
def assert_told_by(oracle: torch.nn.Module, sequence: list[int], got: torch.Tensor, want: torch.Tensor) -> None:
    """The logits are the oracle's, as far as float32 can tell.

    Some weights and prompts make ten times as much of a rounding as others. Where the usual bound does not hold, the
    farthest that the oracle itself gets from its float64, with weights moved by a unit in the last place, is one.
    """
    if difference(got, want) <= 1e-4:
        return
    ids = torch.tensor([sequence])
    exact = copy.deepcopy(oracle).double()(ids).logits[0]
    farthest = max(difference(nudged(oracle)(ids).logits[0], exact) for _ in range(4))
    assert_close(got, exact, max(1e-4, 4 * farthest))


def test_logits_equal_transformers_whole_chunked_and_in_mixed_batches(
    checkpoint: Path, rng: np.random.Generator
) -> None:
    oracle, decoder = load_oracle(checkpoint), load(checkpoint)
    assert decoder.architecture.num_parameters() == oracle.num_parameters()
    lengths = [int(length) for length in rng.integers(1, 70, 5)]
    sequences = [rng.integers(0, decoder.architecture.vocab_size, length).tolist() for length in lengths]
    with torch.inference_mode():
        want = [oracle(torch.tensor([sequence])).logits[0] for sequence in sequences]

    whole = [[(request, length) for request, length in enumerate(lengths)]]
    for schedule in (whole, random_schedule(lengths, 24, rng)):
        page_size = int(rng.choice([1, 4, 16]))
        for backend in ("reference", "cpu"):
            requests = PagedRequests(sequences, page_size, rng)
            attention = make_attention(backend, decoder.attention_spec, requests.num_pages, page_size, torch.float32)
            found = requests.run(decoder, attention, schedule)
            for sequence, got, expected in zip(sequences, found, want, strict=True):
                assert_told_by(oracle, sequence, got, expected)


def test_logits_of_a_long_sequence_cross_the_query_chunks(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path, "mistral", tokenizer=False, sliding_window=150)
    oracle, decoder = load_oracle(folder), load(folder)
    sequence = rng.integers(0, 331, 400).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([sequence])).logits[0]
    requests = PagedRequests([sequence], 16, rng)
    attention = make_attention("cpu", decoder.attention_spec, requests.num_pages, 16, torch.float32)
    (got,) = requests.run(decoder, attention, [[(0, 1)], [(0, 300)], [(0, 98)], [(0, 1)]])
    assert_close(got, want)


def test_bfloat16_logits_stay_near_float32_ones(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", tokenizer=False, dtype=torch.bfloat16)
    sequence = rng.integers(0, 331, 60).tolist()
    runs = {}
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load(folder, str(dtype).removeprefix("torch."))
        requests = PagedRequests([sequence], 16, rng)
        attention = make_attention("cpu", decoder.attention_spec, requests.num_pages, 16, dtype)
        (runs[dtype],) = requests.run(decoder, attention, [[(0, 40)], *[[(0, 1)]] * 20])
    assert_close(runs[torch.bfloat16], runs[torch.float32], relative=0.1)


@pytest.mark.parametrize(
    ("family", "dtype"),
    # The experts in bfloat16 are left out: oneDNN rounds one product in thousands by its number of rows.
    [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("qwen3_moe", torch.float32)],
)
def test_logits_are_bit_identical_alone_and_in_company(
    family: str, dtype: torch.dtype, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Each request runs the same chunks of its own, first in mixed batches, then alone."""
    decoder = load(make_checkpoint(tmp_path, family, tokenizer=False), str(dtype).removeprefix("torch."))
    lengths = [int(length) for length in rng.integers(1, 150, 5)]
    sequences = [rng.integers(0, 331, length).tolist() for length in lengths]
    schedule = random_schedule(lengths, 40, rng)

    def run(steps: list[list[tuple[int, int]]]) -> list[torch.Tensor]:
        requests = PagedRequests(sequences, 16, rng)
        attention = make_attention("cpu", decoder.attention_spec, requests.num_pages, 16, dtype)
        return requests.run(decoder, attention, steps)

    together = run(schedule)
    for request, mixed in enumerate(together):
        own = [[chunk for chunk in chunks if chunk[0] == request] for chunks in schedule]
        alone = run([chunks for chunks in own if chunks])[request]
        assert torch.equal(alone, mixed), f"lengths {lengths}, request {request}, {schedule}"


def test_scaled_logits_have_the_same_largest(tmp_path: Path, rng: np.random.Generator) -> None:
    """A division may make two logits equal: then the lower id wins, whichever way it is asked for."""
    decoder = load(make_checkpoint(tmp_path, "granite", tokenizer=False, logits_scaling=3.0))
    outputs = torch.randn(50, 32)
    assert torch.equal(decoder.argmax(outputs), decoder.logits(outputs).argmax(-1))
    numbers = 1.75 + torch.arange(9) * 2**-23
    smaller = int((numbers[1:] / 3 == numbers[:-1] / 3).nonzero()[0])
    rows = torch.zeros(331, 32)
    rows[7, 0], rows[9, 0] = numbers[smaller], numbers[smaller + 1]
    decoder.head.load_rows(0, rows)
    assert decoder.argmax(torch.eye(1, 32)).tolist() == [7]


def test_only_the_asked_rows_get_logits(tmp_path: Path, rng: np.random.Generator) -> None:
    decoder = load(make_checkpoint(tmp_path, "qwen2", tokenizer=False))
    requests = PagedRequests([[1, 2, 3], [4, 5]], 16, rng)
    attention = make_attention("auto", decoder.attention_spec, requests.num_pages, 16, torch.float32)
    batch = requests.batch([(0, 3), (1, 2)])
    with torch.inference_mode():
        every = decoder.forward(batch, attention)
        for chosen in ([], [4], [2, 4]):
            indices = torch.tensor(chosen, dtype=torch.int64)
            some = decoder.forward(msgspec.structs.replace(batch, output_indices=indices), attention)
            torch.testing.assert_close(some, every[indices])
