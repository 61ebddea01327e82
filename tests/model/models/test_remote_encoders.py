"""Hidden states of encoders that are not in transformers against the formulas of their code on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.models.test_encoders import rewrite, states_of, texts_of
from tests.model.models.test_logits import assert_close, load
from tests.remote_encoders import REMOTE_ENCODERS, RemoteOracle, make_remote_encoder
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.attention.backend import AttentionConfig
from tokenmill.model.attention.backend_rows import BACKENDS
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.platform.cpu import CpuPlatform

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "jina v2": ("jina_v2", {}),
    "jina v2 one head, odd sizes": ("jina_v2", {"num_attention_heads": 1, "intermediate_size": 77, "vocab_size": 333}),
    "jina v2 twelve heads, one type": ("jina_v2", {"num_attention_heads": 12, "type_vocab_size": 1}),
    "jina v2 eight heads, large epsilon": ("jina_v2", {"num_attention_heads": 8, "layer_norm_eps": 1e-2}),
    "jina v2 long texts": ("jina_v2", {"num_attention_heads": 6, "max_position_embeddings": 300}),
    "jina v2 code": ("jina_v2_code", {}),
    "jina v2 code, six heads, odd sizes": (
        "jina_v2_code",
        {"num_attention_heads": 6, "intermediate_size": 77, "num_hidden_layers": 3, "layer_norm_eps": 1e-3},
    ),
    "nomic experts": ("nomic_moe", {}),
    "nomic experts in every third layer, one for a token, another base": (
        "nomic_moe",
        {"moe_every_n_layers": 3, "n_layer": 5, "moe_top_k": 1, "rotary_emb_base": 77, "n_head": 1},
    ),
    "nomic experts, three of five, as wide as the states, two types": (
        "nomic_moe",
        {"num_experts": 5, "moe_top_k": 3, "n_inner": 48, "type_vocab_size": 2, "n_layer": 2},
    ),
    "nomic without gates and experts": ("nomic_moe", {"moe_every_n_layers": 9, "n_layer": 1}),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_the_formulas(
    case: str, backend: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    family, fields = CASES[case]
    folder = make_remote_encoder(tmp_path, family, seed=int(rng.integers(2**31)), **fields)
    decoder, oracle = load(folder), RemoteOracle(folder)
    texts = texts_of([1, *rng.integers(1, 41, 6).tolist(), decoder.architecture.max_position], rng)
    for text, found in zip(texts, states_of(decoder, texts, backend, rng), strict=True):
        assert_close(found, oracle.states(text))


@pytest.mark.parametrize("family", REMOTE_ENCODERS)
def test_a_text_has_the_same_bits_alone_and_among_others(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    decoder = load(make_remote_encoder(tmp_path, family))
    length = int(rng.integers(2, 40))
    for lengths in ([length] * 5, [length, 1, 37, 8, 2]):
        texts = texts_of(lengths, rng)
        together = states_of(decoder, texts, "cpu", rng)
        for text, found in zip(texts, together, strict=True):
            assert torch.equal(states_of(decoder, [text], "cpu", rng)[0], found)


@pytest.mark.parametrize("family", REMOTE_ENCODERS)
def test_parameters_are_counted(family: str, tmp_path: Path) -> None:
    folder = make_remote_encoder(tmp_path, family)
    assert read_architecture(folder).needs_kv is False
    stored = sum(one.numel() for one in load_file(folder / "model.safetensors").values())
    assert read_architecture(folder).num_parameters() == stored


def test_heads_of_training_and_a_prefix_are_passed_over(tmp_path: Path, rng: np.random.Generator) -> None:
    plain = make_remote_encoder(tmp_path / "plain", "jina_v2", seed=3)
    folder = make_remote_encoder(tmp_path / "bert", "jina_v2", seed=3, prefix="bert.")
    path = folder / "model.safetensors"
    rest = {"cls.predictions.bias": torch.ones(4), "bert.pooler.dense.weight": torch.ones(4, 4)}
    save_file({**load_file(path), **rest}, path)
    text = texts_of([20], rng)[0]
    assert_close(states_of(load(folder), [text], "reference", rng)[0], RemoteOracle(plain).states(text))


def test_the_form_with_normed_heads_is_told_by_the_name_of_its_code(tmp_path: Path) -> None:
    folder = make_remote_encoder(tmp_path, "jina_v2_code")
    rewrite(folder, {"auto_map": None, "_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"})
    assert load(folder).architecture.layers[0].norms_attention_twice
    rewrite(folder, {"_name_or_path": None})
    with pytest.raises(InvalidCheckpoint, match="gated_layers"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("jina_v2", "position_embedding_type", "absolute"),
        ("jina_v2", "feed_forward_type", "original"),
        ("jina_v2", "hidden_act", "relu"),
        ("jina_v2", "is_decoder", True),
        ("nomic_moe", "expert_choice_router", True),
        ("nomic_moe", "num_shared_experts", 1),
        ("nomic_moe", "moe_normalize_expert_weights", True),
        ("nomic_moe", "activation_function", "swiglu"),
        ("nomic_moe", "activation_function", "gelu_new"),
        ("nomic_moe", "ffn_div", 2),
        ("nomic_moe", "moe_top_k", 9),
    ],
)
def test_forms_that_are_not_read_are_refused_by_name(family: str, field: str, value: Any, tmp_path: Path) -> None:
    rewrite(make_remote_encoder(tmp_path, family), {field: value})
    with pytest.raises(InvalidCheckpoint, match=field):
        load(tmp_path)


@pytest.mark.parametrize("name", ["w1", "w2"])
@pytest.mark.parametrize("rows", [0, 320, 640 + 80])
def test_stacks_of_other_sizes_are_refused(name: str, rows: int, tmp_path: Path) -> None:
    folder = make_remote_encoder(tmp_path, "nomic_moe", n_layer=2)
    path, tensor = folder / "model.safetensors", f"encoder.layers.1.mlp.experts.mlp.{name}"
    tensors = load_file(path)
    del tensors[tensor]
    save_file({**tensors, **({tensor: torch.ones(rows, 48)} if rows else {})}, path)
    with pytest.raises(InvalidCheckpoint, match=tensor):
        load(tmp_path)


def test_gpus_say_that_their_attention_has_no_slopes() -> None:
    config = AttentionConfig(AttentionSpec(1, 4, 4, 16, sees_ahead=True, has_alibi=True), 16, "bfloat16", CpuPlatform())
    rows = [row for row in BACKENDS if row.is_for_gpus]
    assert rows and all(row.obstacle(config) for row in rows)
    assert "ALiBi" in str({row.name: row.obstacle(config) for row in rows}["triton"])
