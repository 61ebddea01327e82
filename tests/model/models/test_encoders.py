"""Hidden states of encoders against transformers', alone and among others, by every way that they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import VOCAB_SIZE
from tests.encoder_checkpoints import ENCODERS, encoder_oracle, hidden_states, make_encoder
from tests.model.models.test_logits import assert_close, load
from tests.paging import PagedRequests, make_attention
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.weights.checkpoint import read_architecture

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert one head, tanh gelu, odd sizes": (
        "bert",
        {"num_attention_heads": 1, "hidden_act": "gelu_new", "intermediate_size": 77, "vocab_size": 333},
    ),
    "bert relu, one type, long heads": (
        "bert",
        {"hidden_act": "relu", "type_vocab_size": 1, "num_attention_heads": 2, "num_hidden_layers": 3},
    ),
    "bert silu, large epsilon": ("bert", {"hidden_act": "silu", "layer_norm_eps": 1e-2, "num_hidden_layers": 1}),
    "roberta": ("roberta", {}),
    "roberta pads with another id": ("roberta", {"pad_token_id": 5, "type_vocab_size": 1}),
    "modernbert": ("modernbert", {}),
    "modernbert biases, silu, listed layers, an odd window": (
        "modernbert",
        {
            **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias"), True),
            "hidden_activation": "silu",
            "local_attention": 9,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "modernbert, a window of three": ("modernbert", {"local_attention": 2}),
    "nomic": ("nomic_bert", {}),
    "nomic gelu, one head, another base": (
        "nomic_bert",
        {
            "hidden_act": "gelu",
            "num_attention_heads": 1,
            "type_vocab_size": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
    ),
    "gte": ("gte", {}),
    "gte without types, tanh gelu, odd sizes": (
        "gte",
        {"type_vocab_size": 0, "hidden_act": "gelu_new", "intermediate_size": 77, "num_hidden_layers": 3},
    ),
    "gemma": ("gemma3_text", {}),
    "gemma, an even window, a scaled rope": (
        "gemma3_text",
        {
            "sliding_window": 12,
            "num_key_value_heads": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "jina v3": ("jina_v3", {}),
    "jina v3, one head, another base, two types": (
        "jina_v3",
        {
            "hidden_act": "gelu_new",
            "num_attention_heads": 1,
            "type_vocab_size": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
    ),
    "xlm-roberta": ("xlm_roberta", {"num_attention_heads": 12, "num_hidden_layers": 4}),
}


def texts_of(lengths: list[int], rng: np.random.Generator, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Texts of these lengths, in which the first ids, among them that of padding, are frequent."""
    return [
        np.where(rng.random(n) < 0.2, rng.integers(0, 6, n), rng.integers(0, vocab_size, n)).tolist() for n in lengths
    ]


def states_of(decoder: Decoder, texts: list[list[int]], backend: str, rng: np.random.Generator) -> list[torch.Tensor]:
    """The hidden states of whole texts that share a step."""
    requests = PagedRequests(texts, 16, rng)
    attention = make_attention(backend, decoder.attention_spec, requests.num_pages, 16, torch.float32)
    for tensor in attention.kv.tensors:
        tensor.fill_(torch.nan)
    with torch.inference_mode():
        batch = requests.batch([(number, len(text)) for number, text in enumerate(texts)])
        found = decoder.forward(batch, attention)
    return list(found.split([len(text) for text in texts]))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_transformers(
    case: str, backend: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    family, fields = CASES[case]
    folder = make_encoder(tmp_path, family, seed=int(rng.integers(2**31)), **fields)
    decoder, oracle = load(folder), encoder_oracle(folder)
    texts = texts_of([1, *rng.integers(1, 41, 6).tolist(), decoder.architecture.max_position], rng)
    for text, found in zip(texts, states_of(decoder, texts, backend, rng), strict=True):
        assert_close(found, hidden_states(oracle, text))


def test_the_longest_text_has_a_row_for_each_token(tmp_path: Path) -> None:
    assert load(make_encoder(tmp_path / "a", "bert")).architecture.max_position == 64
    assert load(make_encoder(tmp_path / "b", "xlm_roberta", pad_token_id=1)).architecture.max_position == 62


@pytest.mark.parametrize("family", ENCODERS)
def test_a_text_has_the_same_bits_alone_and_among_others(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    decoder = load(make_encoder(tmp_path, family))
    length = int(rng.integers(2, 40))
    for lengths in ([length] * 5, [length, 1, 37, 8, 2]):
        texts = texts_of(lengths, rng)
        together = states_of(decoder, texts, "cpu", rng)
        for text, found in zip(texts, together, strict=True):
            assert torch.equal(states_of(decoder, [text], "cpu", rng)[0], found)


@pytest.mark.parametrize(
    ("family", "model_class"),
    [
        ("bert", "BertForMaskedLM"),
        ("xlm_roberta", "XLMRobertaForMaskedLM"),
        ("modernbert", "ModernBertForMaskedLM"),
        ("nomic_bert", "NomicBertForMaskedLM"),
        ("gte", "GteForMaskedLM"),
        ("jina_v3", "JinaEmbeddingsV3ForMaskedLM"),
    ],
)
def test_a_model_beside_a_head_is_the_same(
    family: str, model_class: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_encoder(tmp_path, family, model_class=model_class, seed=3)
    text = texts_of([20], rng)[0]
    found = states_of(load(folder), [text], "reference", rng)[0]
    assert_close(found, hidden_states(encoder_oracle(folder), text))


def test_names_of_old_files_are_read(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_encoder(tmp_path, "bert")
    text = texts_of([20], rng)[0]
    (before,) = states_of(load(folder), [text], "cpu", rng)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): one
        for name, one in tensors.items()
    }
    save_file({**renamed, "bert.embeddings.position_ids": torch.arange(64)[None]}, path)
    assert torch.equal(states_of(load(folder), [text], "cpu", rng)[0], before)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert")
    path = folder / "model.safetensors"
    save_file({**load_file(path), "encoder.layer.0.attention.self.distance_embedding.weight": torch.ones(3, 3)}, path)
    with pytest.raises(InvalidCheckpoint, match="distance_embedding"):
        load(folder)


NOMIC_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "max_trained_positions": "max_position_embeddings",
}


def rewrite(folder: Path, fields: dict[str, Any]) -> None:
    """Replace fields of config.json; None removes one."""
    path = folder / "config.json"
    changed = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_nomic_is_read_by_the_names_of_its_own_config(
    activation: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    hidden_act = {"swiglu": "silu", "geglu": "gelu"}[activation]
    rope = {"rope_type": "default", "rope_theta": 555.0}
    folder = make_encoder(tmp_path, "nomic_bert", hidden_act=hidden_act, rope_parameters=rope)
    oracle = encoder_oracle(folder)
    config = json.loads((folder / "config.json").read_text())
    own = {name: config[field] for name, field in NOMIC_FIELDS.items()}
    own |= {"rotary_emb_base": 555, "n_positions": 8192, "rotary_scaling_factor": 2, "activation_function": activation}
    gone = dict.fromkeys((*NOMIC_FIELDS.values(), "hidden_act", "rope_parameters", "head_dim"))
    rewrite(folder, {**gone, **own, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_scale_base": None})
    decoder = load(folder)
    assert decoder.architecture.max_position == 64, "texts end where Nomic's code would stretch the rope"
    text = texts_of([30], rng)[0]
    assert_close(states_of(decoder, [text], "reference", rng)[0], hidden_states(oracle, text))


@pytest.mark.parametrize("prefix", ["", "new."])
def test_gte_is_read_as_alibaba_stores_it_with_its_rope(prefix: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_encoder(tmp_path, "gte")
    oracle, factor, theta, size = encoder_oracle(folder), 2.5, 700.0, 16
    # NTKScalingRotaryEmbedding of Alibaba-NLP/new-impl, without mixed_b.
    frequencies = 1.0 / (theta * factor) ** (torch.arange(0, size, 2).float() / size) / factor ** (2 / size)
    oracle.rotary_emb.inv_freq = frequencies
    rope = {"rope_theta": theta, "rope_scaling": {"type": "ntk", "factor": factor}, "rope_parameters": None}
    form = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True}
    rewrite(folder, {"architectures": ["NewModel"], "model_type": "new", **rope, **form})
    path = folder / "model.safetensors"
    save_file({f"{prefix}{name}": one for name, one in load_file(path).items()}, path)
    text = texts_of([40], rng)[0]
    assert_close(states_of(load(folder), [text], "reference", rng)[0], hidden_states(oracle, text))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("nomic_bert", "moe_every_n_layers", 2),
        ("nomic_bert", "prenorm", True),
        ("nomic_bert", "rotary_emb_fraction", 0.5),
        ("nomic_bert", "n_embd", 48),
        ("gte", "logn_attention_scale", True),
        ("gte", "position_embedding_type", "absolute"),
        ("gte", "rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.1}),
        ("gte", "head_dim", 10),
        ("gemma3_text", "attn_logit_softcapping", 30.0),
    ],
)
def test_forms_that_are_not_read_are_refused_by_name(family: str, field: str, value: Any, tmp_path: Path) -> None:
    rewrite(make_encoder(tmp_path, family), {field: value})
    told = {"n_embd": "activation_function", "rope_scaling": "mixed_b"}.get(field, field)
    with pytest.raises(InvalidCheckpoint, match=told):
        load(tmp_path)


@pytest.mark.parametrize("family", ENCODERS)
def test_parameters_are_counted(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, family)
    assert read_architecture(folder).needs_kv is False
    names = load_file(folder / "model.safetensors").items()
    stored = sum(one.numel() for name, one in names if not name.startswith("pooler."))
    assert read_architecture(folder).num_parameters() == stored


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("hidden_act", "quick_gelu"),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 1),
    ],
)
def test_other_forms_are_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    path = make_encoder(tmp_path, "bert") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(InvalidCheckpoint, match="heads" if field == "num_attention_heads" else field):
        load(tmp_path)
