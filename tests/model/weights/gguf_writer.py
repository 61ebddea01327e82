"""A writer of GGUF files as llama.cpp's converter makes them, with the names of the gguf package.

Nothing of tokenmill is imported: a file is the same whichever version reads it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TensorNameMap,
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
    "gemma4_moe": MODEL_ARCH.GEMMA4,
    "phi3": MODEL_ARCH.PHI3,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "granite_hybrid": MODEL_ARCH.GRANITE_HYBRID,
    "qwen3_5": MODEL_ARCH.QWEN35,
    "qwen3_5_moe": MODEL_ARCH.QWEN35MOE,
    "olmo2": MODEL_ARCH.OLMO2,
    "arcee": MODEL_ARCH.ARCEE,
}


ROPE_BASES = {"gpt_oss": 150000.0, **dict.fromkeys(("gemma3", "gemma4_moe", "lfm2", "lfm2_moe"), 1e6)}
# Kept as floats, though some have two dimensions.
PLAIN = (".bias", "conv.weight", "conv1d.weight", "norm.weight", "ssm_a", "ssm_d")


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute q and k as llama.cpp's converter does for Llama and what it takes for a Llama."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    family: str,
    kind: str | None = None,
    num_drafting: int = 0,
    add: Callable[[GGUFWriter], object] = bool,
) -> Path:
    """A checkpoint folder as one file; matrices in a block type, or as float32; layers that draft behind the others."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model-file.gguf"
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    num_layers = config["num_hidden_layers"]
    writer.add_block_count(num_layers + num_drafting)
    if num_drafting:
        writer.add_nextn_predict_layers(num_drafting)
    drafting, tensors = of_mtp(load_file(folder / "model.safetensors"), num_layers)
    for name, tensor in (drafting or unread_layers(num_layers, num_drafting)).items():
        writer.add_tensor(name, tensor)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(kv_heads(config))
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_rope_freq_base(ROPE_BASES.get(family, 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    add_own(writer, family, config)
    names = get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    stacked: dict[str, list[np.ndarray]] = {}
    change = {"granite_hybrid": of_granite_hybrid, "lfm2_moe": of_lfm2_moe, "gemma4_moe": of_gemma4}.get(
        family, unstacked
    )
    for stored, tensor in change(tensors, config).items():
        name, values = stored, tensor.float().numpy()
        if family in ("llama", "smollm3", "granite", "granite_hybrid", "arcee") and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = interleaved(values, heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        if family in ("qwen3_5", "qwen3_5_moe"):
            name, values = of_qwen35(name, values, config)
        is_thin = name.endswith(("conv.conv.weight", "conv1d.weight", "shared_expert_gate.weight"))
        values = values.squeeze() if is_thin else values
        stacked.setdefault(written_name(name, names), []).append(values)
    for name, parts in stacked.items():
        values = np.stack(parts) if len(parts) > 1 else parts[0]
        if kind is not None and values.ndim > 1 and not name.endswith(PLAIN):
            block = GGMLQuantizationType[kind]
            writer.add_tensor(name, quants.quantize(values, block), raw_dtype=block)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    add_tokenizer(writer, folder)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written_name(name: str, names: TensorNameMap) -> str:
    """A tensor's name in the file; one name for all experts of a layer."""
    if name.startswith("blk."):
        return name
    spelled = name.replace("sinks", "sinks.weight").replace("expert_bias", "expert_bias.bias")
    module, suffix = re.sub(r"\.experts\.\d+", ".experts", spelled).rsplit(".", 1)
    return names.get_name(spelled) or f"{names.get_name(module)}.{suffix}"


def unread_layers(first: int, count: int) -> dict[str, np.ndarray]:
    """Layers that draft, of which there is no more than a name."""
    return {f"blk.{layer}.nextn.eh_proj.weight": np.zeros((4, 8), np.float32) for layer in range(first, first + count)}


def of_mtp(tensors: dict[str, Any], layer: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Take a Qwen3.5's MTP layer out of its tensors: those of block `layer`, and the others."""
    own = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    names = get_tensor_name_map(MODEL_ARCH.QWEN35, layer + 1)
    found, others = {}, dict(tensors)
    for name in [name for name in tensors if name.startswith("mtp.")]:
        values, (stem, _, kind) = others.pop(name).float().numpy(), name[4:].rpartition(".")
        if stem in own:
            written = f"blk.{layer}.nextn.{own[stem]}"
        else:
            written = names.get_name(stem.replace("layers.0", f"model.layers.{layer}"))
        found[f"{written}.{kind}"] = values + 1 if "norm" in stem else values
    return found, others


def head_size(config: dict[str, Any]) -> int:
    """That of layers which attend to all, where some have another."""
    own = [layer["head_dim"] for layer in (config.get("per_layer_config") or {}).values()]
    return own[0] if own else config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def kv_heads(config: dict[str, Any]) -> int | list[int]:
    """Those of each layer, where some have no attention."""
    count, kinds = config["num_key_value_heads"], config.get("layer_types") or []
    if own := config.get("per_layer_config"):
        return [own.get(str(layer), {}).get("num_key_value_heads", count) for layer in range(len(kinds))]
    other = "linear_attention" if "mamba_n_heads" in config else "conv"
    return [0 if kind == other else count for kind in kinds] if other in kinds else count


def add_own(writer: GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """Add the values of one family."""
    if family in ("qwen3_moe", "qwen3_5_moe", "lfm2_moe"):
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family in ("granite", "granite_hybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        add_llama3_factors(writer, config)
    if family in ("gemma3", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "gemma4_moe":
        add_gemma4(writer, config)
    if family == "granite_hybrid":
        add_granite_hybrid(writer, config)
    if family == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if family in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if family in ("qwen3_5", "qwen3_5_moe"):
        add_qwen35(writer, config)
    if family == "qwen3_5_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family == "phi3":
        add_phi3_rope(writer, config)
    if family == "gpt_oss":
        add_gpt_oss(writer, config)


def add_gemma4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    full = head_size(config)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(10000.0)
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    turning = int(full * share / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (full // 2 - turning), np.float32))
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def of_gemma4(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Scales by the names that the converter gives them, and what has no suffix with one."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer = re.sub(r"model\.layers\.(\d+)\..*", r"blk.\1", name)
        match name.rpartition(".")[2]:
            case "scale":
                found[f"{layer}.ffn_gate_inp.scale"] = tensor
            case "per_expert_scale":
                found[f"{layer}.ffn_down_exps.scale"] = tensor
            case "layer_scalar" | "gate_up_proj" | "down_proj":
                found[f"{name}.weight"] = tensor
            case _:
                found[name] = tensor
    return found


def add_qwen35(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))


def of_qwen35(name: str, values: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """Value heads in the order of their places in their groups; norms with the 1, rates as they are applied."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tiled(part: np.ndarray, axis: int = 0) -> np.ndarray:
        shape = part.shape
        split = (*shape[:axis], keys, heads // keys, shape[axis] // heads, *shape[axis + 1 :])
        return part.reshape(split).swapaxes(axis, axis + 1).reshape(shape)

    before = 2 * keys * config["linear_key_head_dim"]
    match name.partition("linear_attn.")[2]:
        case "in_proj_qkv.weight" | "conv1d.weight":
            values = np.concatenate((values[:before], tiled(values[before:])))
        case "in_proj_z.weight" | "in_proj_a.weight" | "in_proj_b.weight":
            values = tiled(values)
        case "out_proj.weight":
            values = tiled(values, 1)
        case "A_log":
            values = -np.exp(tiled(values))
        case "dt_bias":
            name, values = name.replace("dt_bias", "dt_proj.bias"), tiled(values)
        case "":
            values = values + 1 if name.endswith("norm.weight") else values
    return name, values


def add_granite_hybrid(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def of_granite_hybrid(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gate and up apart; rates as they are applied, norms by groups, A and D as columns."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, _ = name.rpartition(".input_linear.weight")
        if stem:
            layer, _, block = stem.rpartition(".")
            shared = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            own = shared if block == "shared_mlp" else "mlp.experts"
            gate, up = tensor.chunk(2, -2)
            found |= {f"{layer}.{own}.gate_proj.weight": gate, f"{layer}.{own}.up_proj.weight": up}
        elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
        elif name.endswith("dt_bias"):
            found[name.replace("dt_bias", "dt_proj.bias")] = tensor
        elif name.endswith("mamba.A_log"):
            found[name] = -tensor.exp().unsqueeze(1)
        elif name.endswith("mamba.D"):
            found[name] = tensor.unsqueeze(1)
        elif name.endswith("mamba.norm.weight"):
            found[name] = tensor.view(config["mamba_n_groups"], -1)
        else:
            found[name] = tensor
    return found


def of_lfm2_moe(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Experts by the names that the gguf package knows."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    parts = [(name, re.fullmatch(r"(.*\.experts\.\d+)\.(w\d)\.weight", name)) for name in tensors]
    return {name if own is None else f"{own[1]}.{names[own[2]]}.weight": tensors[name] for name, own in parts}


def add_llama3_factors(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Llama 3's: a frequency is divided by the tensor's number."""
    rope = config["rope_parameters"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * math.pi * 10000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    writer.add_tensor("rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32))


def add_phi3_rope(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def add_gpt_oss(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def unstacked(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """gpt-oss has gate and up in turns in one tensor, and inputs before outputs; GGUF has them as others are."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".experts.")
        if not stem or not last.startswith(("gate_up_proj", "down_proj")):
            found[name] = tensor
            continue
        suffix = "bias" if last.endswith("_bias") else "weight"
        values = tensor if suffix == "bias" else tensor.transpose(1, 2)
        parts = (
            {"gate_proj": values[:, ::2], "up_proj": values[:, 1::2]} if "gate_up" in last else {"down_proj": values}
        )
        found |= {f"{stem}.experts.{part}.{suffix}": own for part, own in parts.items()}
    return found


def add_tokenizer(writer: GGUFWriter, folder: Path, template: str = "{{ messages[0]['content'] }}") -> None:
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
    writer.add_chat_template(template)
