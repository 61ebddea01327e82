"""A writer of GGUF files as llama.cpp's converter makes them, with the names of the gguf package.

Nothing of tokenmill is imported: a file is the same whichever version reads it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
    quants,
)
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "granite": MODEL_ARCH.GRANITE,
    "gemma3": MODEL_ARCH.GEMMA3,
}


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama and of what it takes for a Llama."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, family: str, kind: str | None = None) -> Path:
    """A checkpoint folder as one file; matrices in a block type, or as float32."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model-file.gguf"
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_value_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(1e6 if family == "gemma3" else 10000.0)
    writer.add_vocab_size(config["vocab_size"])
    if family == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    names = get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    stacked: dict[str, list[np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if family in ("llama", "smollm3", "granite") and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = interleaved(values, heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        module, suffix = re.sub(r"\.experts\.\d+", ".experts", name).rsplit(".", 1)
        stacked.setdefault(f"{names.get_name(module)}.{suffix}", []).append(values)
    for name, parts in stacked.items():
        values = np.stack(parts) if "_exps" in name else parts[0]
        if kind is not None and values.ndim > 1:
            block = GGMLQuantizationType[kind]
            writer.add_tensor(name, quants.quantize(values, block), raw_dtype=block)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    add_tokenizer(writer, folder)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in stored["added_tokens"]}
    vocabulary = stored["model"]["vocab"] | special
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_chat_template("{{ messages[0]['content'] }}")
