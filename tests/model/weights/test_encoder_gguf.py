"""GGUF files of encoders, written as llama.cpp's converter writes them: their vectors and scores are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, PoolingType, TokenType, get_tensor_name_map
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.embedders import unit
from tests.encoder_checkpoints import encoder_oracle, hidden_states, make_encoder, write_word_pieces
from tests.remote_encoders import RemoteOracle, make_remote_encoder
from tokenmill import LLM
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.folder import tokenizer_files

ARCHITECTURES = {
    "bert": MODEL_ARCH.BERT,
    "roberta": MODEL_ARCH.BERT,
    "nomic_bert": MODEL_ARCH.NOMIC_BERT,
    "modernbert": MODEL_ARCH.MODERN_BERT,
    "gemma3_text": MODEL_ARCH.GEMMA_EMBEDDING,
}
REMOTE = {
    "jina_v2": MODEL_ARCH.JINA_BERT_V2,
    "jina_v2_code": MODEL_ARCH.JINA_BERT_V2,
    "nomic_moe": MODEL_ARCH.NOMIC_BERT_MOE,
}
HEADS = {
    "head.dense": "cls",
    "classifier.dense": "cls",
    "head.norm": "cls.norm",
    "classifier.out_proj": "cls.output",
    "classifier": "cls.output",
}
TEXTS = ["a cat", "x", "do not, he's here. " * 3, "one two three four five"]


def write_encoder(
    folder: Path, family: str, pooling: PoolingType | None, add: Callable[[GGUFWriter], object] = bool
) -> Path:
    """Write the encoder of a folder as one file in another, without a tokenizer's file; poolers are left out."""
    config, kind = json.loads((folder / "config.json").read_text()), ARCHITECTURES[family]
    path = folder / "gguf" / f"{family}.gguf"
    path.parent.mkdir()
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[kind])
    layers, cut = config["num_hidden_layers"], config["pad_token_id"] + 1 if family == "roberta" else 0
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"] - cut)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if family == "gemma3_text":
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_causal_attention(False)
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_eps"])
    _add_ropes(writer, family, config)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if "type_vocab_size" in config:
        writer.add_token_type_count(config["type_vocab_size"])
    names = get_tensor_name_map(kind, layers)
    for stored, tensor in load_file(folder / "model.safetensors").items():
        name = stored.removeprefix(f"{family.removesuffix('_text')}.").removeprefix("model.")
        stem, _, suffix = name.rpartition(".")
        if stem == "pooler.dense":
            continue
        values = tensor.float().numpy()
        values = values[cut:] if "position_embeddings" in name else values
        values = values + 1 if family == "gemma3_text" and name.endswith("norm.weight") else values
        writer.add_tensor(
            f"{HEADS.get(stem) or names.get_name(stem) or names.get_name(f'model.{stem}')}.{suffix}", values
        )
    _add_word_pieces(writer, folder)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_remote_encoder(folder: Path, family: str, parts_gates: bool) -> Path:
    """The same of an encoder whose code is on the hub; gated products as two tensors, as in files of 2024, or one."""
    config, kind = json.loads((folder / "config.json").read_text()), REMOTE[family]
    path = folder / "gguf" / f"{family}.gguf"
    path.parent.mkdir()
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[kind])
    layers = config.get("n_layer") or config["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_context_length(config.get("max_trained_positions") or config["max_position_embeddings"])
    writer.add_embedding_length(config.get("n_embd") or config["hidden_size"])
    writer.add_feed_forward_length(config.get("n_inner") or config["intermediate_size"])
    writer.add_head_count(config.get("n_head") or config["num_attention_heads"])
    writer.add_layer_norm_eps(config.get("layer_norm_epsilon") or config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)
    writer.add_token_type_count(config["type_vocab_size"])
    if family == "nomic_moe":
        writer.add_rope_freq_base(config["rotary_emb_base"])
        writer.add_moe_every_n_layers(config["moe_every_n_layers"])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["moe_top_k"])
    names = get_tensor_name_map(kind, layers)
    for stored, tensor in load_file(folder / "model.safetensors").items():
        stem, suffix, values = stored.removesuffix(".weight").removesuffix(".bias"), stored.rpartition(".")[2], tensor
        if "mlp.experts" in stem:
            if suffix == "bias":
                continue
            values = values.view(config["num_experts"], config["n_inner"], config["n_embd"])
            values, suffix = values.transpose(1, 2) if suffix == "w2" else values, "weight"
        gate_is_first = "gated_layers" in stem
        if parts_gates and (gate_is_first or "up_gated_layer" in stem):
            halves = values.chunk(2) if gate_is_first else reversed(values.chunk(2))
            block = names.get_name(stem).removesuffix("ffn_up")
            for role, half in zip(("ffn_gate", "ffn_up"), halves, strict=True):
                writer.add_tensor(f"{block}{role}.weight", half.contiguous().numpy())
            continue
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", values.contiguous().numpy())
    _add_word_pieces(writer, folder)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_ropes(writer: GGUFWriter, family: str, config: dict[str, Any]) -> None:
    ropes = config.get("rope_parameters") or {}
    if family == "nomic_bert":
        writer.add_rope_freq_base(ropes["rope_theta"])
    elif ropes:
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.get("local_attention") or config["sliding_window"])
    if family == "modernbert":
        writer.add_sliding_window_pattern(3)


def _add_word_pieces(writer: GGUFWriter, folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    special = {token: vocabulary[token] for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")}
    tokens = sorted(vocabulary, key=vocabulary.get)
    turned = [
        token if token in special else token[2:] if token.startswith("##") else f"\u2581{token}" for token in tokens
    ]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(turned)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    for name, token in {"bos": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]"}.items():
        getattr(writer, f"add_{name}_token_id")(special[token])


def ids_of(folder: Path, *texts: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.encode(*texts).ids


def encoder_of(folder: Path, family: str, model_class: str = "", **fields: Any) -> Path:
    # The scale of scores has no key in files: it follows from the heads.
    fields |= {"query_pre_attn_scalar": 16} if family == "gemma3_text" else {}
    make_encoder(folder, family, model_class=model_class, **fields)
    write_word_pieces(folder)
    return folder


@pytest.mark.parametrize("pooling", [PoolingType.MEAN, PoolingType.CLS, None])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_vectors_of_files_are_those_of_transformers(family: str, pooling: PoolingType | None, tmp_path: Path) -> None:
    fields = {} if family in ("modernbert", "gemma3_text") else {"layer_norm_eps": 3e-4}
    fields |= {"pad_token_id": 1} if family == "roberta" else {}
    folder = encoder_of(tmp_path, family, **fields)
    oracle = encoder_oracle(folder)
    path = write_encoder(folder, family, pooling)
    with LLM(str(path), dtype="float32", download_dir=str(tmp_path / "cache")) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, found, strict=True):
        states = hidden_states(oracle, ids_of(folder, text)).numpy()
        wanted = states[0] if pooling is PoolingType.CLS else states.mean(0)
        np.testing.assert_allclose(output.outputs.embedding, unit(wanted), atol=3e-5)


@pytest.mark.parametrize(
    ("family", "parts_gates", "dtype"),
    [
        ("jina_v2", False, "float32"),
        ("jina_v2", True, "float32"),
        ("jina_v2", False, "bfloat16"),
        ("jina_v2_code", False, "float32"),
        ("jina_v2_code", True, "float32"),
        ("nomic_moe", False, "float32"),
    ],
)
def test_vectors_of_files_are_those_of_the_formulas_on_the_hub(
    family: str, parts_gates: bool, dtype: str, tmp_path: Path
) -> None:
    folder = make_remote_encoder(tmp_path, family)
    write_word_pieces(folder)
    oracle = RemoteOracle(folder)
    for name, tensor in oracle.tensors.items():
        if name.endswith("experts.bias"):
            tensor.zero_()  # the converter leaves it out
    path = write_remote_encoder(folder, family, parts_gates)
    with LLM(str(path), dtype=dtype, download_dir=str(tmp_path / "cache")) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, found, strict=True):
        wanted = unit(oracle.states(ids_of(folder, text)).numpy().mean(0))
        if dtype == "float32":
            np.testing.assert_allclose(output.outputs.embedding, wanted, atol=3e-5)
        else:
            assert float(np.dot(output.outputs.embedding, wanted)) > 0.999


def test_the_layers_of_embedding_gemma_follow(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = encoder_of(tmp_path, "gemma3_text", sliding_window=5)
    first, second = (rng.standard_normal(shape).astype(np.float32) / 6 for shape in ((70, 48), (48, 70)))

    def with_layers(writer: GGUFWriter) -> None:
        writer.add_tensor("dense_2.weight", first)
        writer.add_tensor("dense_3.weight", second)
        writer.add_dense_features_dims("dense_2", 48, 70)
        writer.add_dense_features_dims("dense_3", 70, 48)

    oracle = encoder_oracle(folder)
    path = write_encoder(folder, "gemma3_text", PoolingType.MEAN, with_layers)
    with LLM(str(path), dtype="float32", download_dir=str(tmp_path / "cache")) as llm:
        (found,) = llm.embed(TEXTS[2:3], use_tqdm=False)
    mean = hidden_states(oracle, ids_of(folder, TEXTS[2])).numpy().mean(0)
    np.testing.assert_allclose(found.outputs.embedding, unit(second @ (first @ mean)), atol=3e-5)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "model_class", "fields"),
    [
        ("roberta", "RobertaForSequenceClassification", {"pad_token_id": 1, "type_vocab_size": 1}),
        ("modernbert", "ModernBertForSequenceClassification", {"classifier_pooling": "mean"}),
    ],
)
def test_scores_of_rerankers_are_those_of_transformers(
    family: str, model_class: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = encoder_of(tmp_path, family, model_class, num_labels=1, **fields)
    oracle = getattr(transformers, model_class).from_pretrained(folder, dtype=torch.float32).eval()
    path = write_encoder(
        folder, family, PoolingType.RANK, lambda writer: writer.add_classifier_output_labels(["LABEL_0"])
    )
    with LLM(str(path), dtype="float32", download_dir=str(tmp_path / "cache")) as llm:
        found = llm.score("a cat", TEXTS, use_tqdm=False, use_activation=False)
    for text, output in zip(TEXTS, found, strict=True):
        wanted = oracle(torch.tensor([ids_of(folder, "a cat", text)])).logits[0, 0]
        assert output.outputs.score == pytest.approx(float(wanted), abs=3e-5)


# Ids: <s> is 0, </s> is 2, and a, b, c are 4, 5, 6.
@pytest.mark.parametrize(
    ("texts", "wanted"), [(("a b",), [0, 4, 5, 2]), (("a b", "c"), [0, 4, 5, 2, 2, 6, 2])], ids=["one", "pair"]
)
def test_texts_of_roberta_are_joined_as_its_tokenizer_does(
    texts: tuple[str, ...], wanted: list[int], tmp_path: Path
) -> None:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"\u2581{one}", -2.0) for one in "abc")]
    writer = GGUFWriter(tmp_path / "x.gguf", "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([score for _, score in pieces])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.NORMAL] * 3)
    for name, number in {"bos": 0, "eos": 2, "sep": 2, "unk": 3}.items():
        getattr(writer, f"add_{name}_token_id")(number)
    for flag in ("add_add_bos_token", "add_add_eos_token", "add_add_sep_token"):  # as the gguf package finds them
        getattr(writer, flag)(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = tokenizer_files(open_gguf(tmp_path / "x.gguf"))["tokenizer.json"]
    assert Tokenizer.from_str(stored.decode()).encode(*texts).ids == wanted


def test_a_cross_encoder_whose_pooler_was_left_out_is_refused(tmp_path: Path) -> None:
    folder = encoder_of(tmp_path, "bert", "BertForSequenceClassification", num_labels=1)
    path = write_encoder(folder, "bert", PoolingType.RANK)
    with pytest.raises(InvalidCheckpoint, match=r"no tensor cls\.weight"):
        LLM(str(path), dtype="float32", download_dir=str(tmp_path / "cache"))
