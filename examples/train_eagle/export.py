"""A head as a checkpoint in vLLM's form: config.json and model.safetensors in bfloat16, without an embedding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from examples.train_eagle.batches import Vocabulary
from examples.train_eagle.head import EagleHead, HeadShape
from safetensors.torch import load_file, save_file


def write_checkpoint(
    folder: Path, head: EagleHead, vocabulary: Vocabulary, target: Mapping[str, Any], boundaries: Sequence[int]
) -> int:
    """Write a head into a folder; return the bytes of its weights.

    Args:
        target: the config.json of the model that it drafts for. boundaries: see `tap_boundaries`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(head.shape, target, boundaries), indent=2) + "\n")
    tensors = {name: weight.bfloat16().contiguous() for name, weight in head.weights().items()}
    ids = vocabulary.ids
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": vocabulary.places >= 0}
    path = folder / "model.safetensors"
    save_file(tensors, path.with_suffix(".tmp"), metadata={"format": "pt"})
    path.with_suffix(".tmp").replace(path)
    return path.stat().st_size


def config_of(shape: HeadShape, target: Mapping[str, Any], boundaries: Sequence[int]) -> dict[str, Any]:
    """Return a head's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": target.get("bos_token_id"),
        "draft_vocab_size": shape.draft_vocab_size,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(boundaries),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(boundaries), "use_aux_hidden_state": True},
        "eos_token_id": target.get("eos_token_id"),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": target["max_position_embeddings"],
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "target_hidden_size": shape.hidden_size,
        "tie_word_embeddings": False,
        "vocab_size": target["vocab_size"],
    }


def read_checkpoint(folder: Path) -> tuple[EagleHead, Vocabulary]:
    """Return the head of a folder, in float32, and its vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    ids = tensors.pop("d2t")
    vocabulary = Vocabulary.of(ids + torch.arange(len(ids)), len(tensors.pop("t2d")))
    head = EagleHead(shape_of(config))
    weights = {name: weight.float() for name, weight in tensors.items()}
    head.load_state_dict({**weights, "tap_scale": head.tap_scale})
    return head, vocabulary


def shape_of(config: Mapping[str, Any]) -> HeadShape:
    """Return the shape that a head's config.json describes."""
    return HeadShape(
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        draft_vocab_size=config["draft_vocab_size"],
        num_taps=len(config["eagle_aux_hidden_state_layer_ids"]),
        rope_theta=config["rope_theta"],
        rms_eps=config["rms_norm_eps"],
    )
