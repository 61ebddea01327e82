"""A writer of the two GGUF files that llama.cpp's converter makes of a vision model: the decoder, and its tower.

Nothing of tokenmill is imported; names are those of the gguf package.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from safetensors.torch import load_file

from tests.model.weights.gguf_writer import add_tokenizer

KINDS = {
    "qwen3_vl": (MODEL_ARCH.QWEN3VL, "qwen3vl_merger"),
    "qwen3_vl_moe": (MODEL_ARCH.QWEN3VLMOE, "qwen3vl_merger"),
    "qwen2_5_vl": (MODEL_ARCH.QWEN2VL, "qwen2.5vl_merger"),
}


def write_decoder(folder: Path, path: Path) -> Path:
    """Write the text model of a checkpoint with a tower."""
    config = json.loads((folder / "config.json").read_text())
    text, (architecture, _) = config["text_config"], KINDS[config["model_type"]]
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(text["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_sections([*text["rope_parameters"]["mrope_section"], 0])
    names = get_tensor_name_map(architecture, text["num_hidden_layers"])
    if "num_local_experts" in text:
        writer.add_expert_count(text["num_local_experts"])
        writer.add_expert_used_count(text["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
    for stored, tensor in apart(load_file(folder / "model.safetensors")).items():
        if "visual." not in stored:
            module, suffix = stored.replace("language_model.", "").rsplit(".", 1)
            writer.add_tensor(f"{names.get_name(module)}.{suffix}", tensor.float().numpy())
    add_tokenizer(writer, folder, json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
    _finish(writer)
    return path


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Part gate from up in stacks of experts, and name stacks as weights."""
    found: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            gate, up = values.chunk(2, 1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj.weight": gate.contiguous(), f"{stem}up_proj.weight": up.contiguous()}
        else:
            found[f"{name}.weight" if name.endswith(".experts.down_proj") else name] = values
    return found


def write_mmproj(folder: Path, path: Path, kind: str = "F32", swaps_ffn: bool = False) -> Path:
    """Write the tower of a checkpoint; matrices in `kind`.

    Args:
        swaps_ffn: exchange the names of the MLP's up and down, as older converters did.
    """
    config = json.loads((folder / "config.json").read_text())
    tower, processor = config["vision_config"], json.loads((folder / "preprocessor_config.json").read_text())
    writer = GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(KINDS[config["model_type"]][1])
    writer.add_vision_projection_dim(tower["out_hidden_size"])
    writer.add_vision_image_size(560)
    writer.add_vision_patch_size(tower["patch_size"])
    writer.add_vision_embedding_length(tower["hidden_size"])
    writer.add_vision_feed_forward_length(tower["intermediate_size"])
    writer.add_vision_block_count(tower["depth"])
    writer.add_vision_head_count(tower["num_heads"])
    writer.add_vision_image_mean(processor.get("image_mean") or [0.48145466, 0.4578275, 0.40821073])
    writer.add_vision_image_std(processor.get("image_std") or [0.26862954, 0.26130258, 0.27577711])
    writer.add_vision_attention_layernorm_eps(1e-6)
    if "deepstack_visual_indexes" in tower:
        writer.add_vision_spatial_merge_size(tower["spatial_merge_size"])
        levels = [block in tower["deepstack_visual_indexes"] for block in range(tower["depth"])]
        writer.add_vision_is_deepstack_layers(levels)
    else:
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(tower["fullatt_block_indexes"][0] + 1)
    for name, values in _tensors(folder, tower).items():
        written = re.sub("ffn_(up|down)", _other, name) if swaps_ffn else name
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(written, np.ascontiguousarray(values))
        else:
            block = GGMLQuantizationType[kind]
            writer.add_tensor(written, quants.quantize(values, block), raw_dtype=block)
    _finish(writer)
    return path


def _tensors(folder: Path, tower: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tower's tensors by llama.cpp's names, cut as its converter cuts them."""
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, tower["depth"])
    tensors: dict[str, np.ndarray] = {}
    for stored, tensor in load_file(folder / "model.safetensors").items():
        name, values = stored.removeprefix("model."), tensor.float().numpy()
        module, _, suffix = name.rpartition(".")
        if not name.startswith("visual."):
            continue
        if module == "visual.patch_embed.proj" and suffix == "weight":
            tensors["v.patch_embd.weight"], tensors["v.patch_embd.weight.1"] = values[:, :, 0], values[:, :, 1]
        elif ".qkv" in module and "fullatt_block_indexes" in tower:
            for part, third in zip("qkv", np.split(values, 3), strict=True):
                tensors[f"{names.get_name(module.replace('qkv', part))}.{suffix}"] = third
        elif match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(linear_)?(\w+)", module):
            block = tower["deepstack_visual_indexes"][int(match[1])]
            tensors[f"v.deepstack.{block}.{match[3]}.{suffix}"] = values
        elif match := re.fullmatch(r"visual\.merger\.linear_fc(\d)", module):
            tensors[f"mm.{2 * int(match[1]) - 2}.{suffix}"] = values
        elif module == "visual.merger.norm":
            tensors[f"v.post_ln.{suffix}"] = values
        else:
            tensors[f"{names.get_name(module)}.{suffix}"] = values
    return tensors


def _other(match: re.Match[str]) -> str:
    return "ffn_down" if match[1] == "up" else "ffn_up"


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
