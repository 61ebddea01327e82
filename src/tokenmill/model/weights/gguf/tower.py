"""A vision tower in a GGUF file of its own, llama.cpp's mmproj: its part of config.json, and its tensors' names.

The file does not say to how many pixels images are resized: without the model's preprocessor_config.json beside it they
are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.gguf.file import GgufFile

# Kind of the projector -> architectures of the whole models that have it.
PROJECTORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qwen3vl_merger": ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        "qwen2.5vl_merger": ("Qwen2_5_VLForConditionalGeneration",),
    }
)
MARKS: Mapping[str, str] = MappingProxyType(
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
)
# Field of vision_config -> key of the metadata, after "clip.vision.".
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "depth": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_heads": "attention.head_count",
        "out_hidden_size": "projection_dim",
        "patch_size": "patch_size",
    }
)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "patch_embed.proj": "v.patch_embd",
        "pos_embed": "v.position_embd",
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.qkv": "attn_qkv",
        "attn.proj": "attn_out",
        "merger.norm": "v.post_ln",
        "merger.linear_fc1": "mm.0",
        "merger.linear_fc2": "mm.2",
        "norm": "norm",
        "linear_fc1": "fc1",
        "linear_fc2": "fc2",
    }
)
"""Module of a tower -> its name in a file; of a block or a deepstack merger, what follows its number."""


def tower_config(tower: GgufFile, model: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model with a tower.

    Args:
        fields: those of the model alone.

    Raises:
        InvalidCheckpoint: a tower of another model, or one that is not supported.
    """
    kind = tower.metadata.get("clip.projector_type", tower.metadata.get("clip.vision.projector_type"))
    if kind not in PROJECTORS:
        supported = ", ".join(PROJECTORS)
        raise InvalidCheckpoint(f"{tower.path}: projector {kind} is not supported; supported: {supported}")
    if fields["architectures"][0] not in PROJECTORS[kind]:
        raise InvalidCheckpoint(f"{tower.path} has the vision tower of another model than {model.path.name}")
    text = {name: value for name, value in fields.items() if name != "architectures"}
    sections = model.metadata.get(f"{model.metadata['general.architecture']}.rope.dimension_sections")
    if sections:
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": list(sections)[:3]}
    return {
        "architectures": fields["architectures"],
        "tie_word_embeddings": fields["tie_word_embeddings"],
        "text_config": text,
        "vision_config": _vision_config(tower),
        **_mark_ids(model),
    }


def _vision_config(tower: GgufFile) -> dict[str, Any]:
    config = {name: _value(tower, key) for name, key in FIELDS.items()}
    config["spatial_merge_size"] = tower.metadata.get("clip.vision.spatial_merge_size", 2)
    positions = tower.tensors.get("v.position_embd.weight")
    if positions is None:
        pattern = _value(tower, "n_wa_pattern")
        blocks = list(range(pattern - 1, config["depth"], pattern))
        # The file does not say how fast time goes: as in the published models.
        return config | {"fullatt_block_indexes": blocks, "tokens_per_second": 2}
    levels = enumerate(tower.metadata.get("clip.vision.is_deepstack_layers") or ())
    return config | {
        "num_position_embeddings": positions.shape[0],
        "deepstack_visual_indexes": [block for block, has_merger in levels if has_merger],
    }


def _value(tower: GgufFile, key: str) -> Any:
    try:
        return tower.metadata[f"clip.vision.{key}"]
    except KeyError as error:
        raise InvalidCheckpoint(f"{tower.path} has no value of {error.args[0]}") from None


def _mark_ids(model: GgufFile) -> dict[str, int]:
    tokens: Sequence[str] = model.metadata.get("tokenizer.ggml.tokens") or ()
    ids = {token: number for number, token in enumerate(tokens) if token in MARKS.values()}
    missing = [token for token in MARKS.values() if token not in ids]
    if missing:
        raise InvalidCheckpoint(f"{model.path}: the vocabulary has no {missing[0]}, which images need")
    return {name: ids[token] for name, token in MARKS.items()}


def processor_config(tower: GgufFile) -> dict[str, Any]:
    """Return what the file says of a preprocessor_config.json: mean and deviation of each channel."""
    return {name: list(_value(tower, name)) for name in ("image_mean", "image_std")}


def stored_names(name: str, tower: GgufFile, deepstack: Sequence[int]) -> list[str]:
    """Return the names of the tensors that a weight of a tower is made of, in order.

    Args:
        name: of the weight, by Qwen3-VL's names. deepstack: the blocks with a merger of their own.
    """
    module, _, suffix = name.rpartition(".")
    if name == "patch_embed.proj.weight":  # one for each of two frames
        return ["v.patch_embd.weight", "v.patch_embd.weight.1"]
    place, number, inner = _place(module)
    if place == "blocks":
        parts = _parts_of_block(f"v.blk.{number}", inner, tower)
    elif place == "deepstack_merger_list":
        parts = [f"v.deepstack.{deepstack[number]}.{NAMES[inner]}"]
    else:
        parts = [NAMES[module]]
    return [f"{part}.{suffix}" for part in parts]


def _place(module: str) -> tuple[str, int, str]:
    """Part the name of a module of a list: its list, its number there, what follows."""
    place, _, rest = module.partition(".")
    number, _, inner = rest.partition(".")
    return (place, int(number), inner) if number.isdigit() else ("", 0, module)


def _parts_of_block(block: str, inner: str, tower: GgufFile) -> list[str]:
    if inner == "attn.qkv" and f"{block}.attn_qkv.weight" not in tower.tensors:
        return [f"{block}.attn_{part}" for part in "qkv"]
    down, up = f"{block}.ffn_down", f"{block}.ffn_up"
    stored = tower.tensors.get(f"{down}.weight")
    if stored is not None and stored.shape[-1] == tower.metadata.get("clip.vision.embedding_length"):
        down, up = up, down  # older converters exchanged the names
    if inner == "mlp.linear_fc2":
        return [down]
    if inner == "mlp.linear_fc1":
        return [f"{block}.ffn_gate", up] if f"{block}.ffn_gate.weight" in tower.tensors else [up]
    return [f"{block}.{NAMES[inner]}"]
