"""Nomic's BERT (Nussbaum et al. 2024: nomic-embed-text v1 and v1.5): ropes in the place of positions, a gated block.

Its config has the names of GPT-2's fields, as Nomic's own code reads them, or those of transformers. Version 2
(Nussbaum and Duderstadt 2025: nomic-embed-text-v2-moe), by its own names alone, has blocks without gates, and in every
nth layer a mixture of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.input_spec import InputSpec
from tokenmill.model.architecture.mlp_spec import ExpertStack, MlpSpec, MoeSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import read_depth, refuse
from tokenmill.model.models.encoder_config import (
    GATES,
    encoder,
    read_both_ways,
    read_encoder_activation,
    read_layer_norm,
)
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import ENCODER_NAMES, GGUF_NAMES, TOKEN_TYPES, GgufHeader, GgufTable
from tokenmill.model.models.mlp_config import MOST_EXPERTS
from tokenmill.model.models.rope_config import read_rope

# Nomic's names of fields, and transformers'.
_RENAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "max_trained_positions": "max_position_embeddings",
}
_GATES = {"swiglu": "silu", "geglu": "gelu"}
_PLAIN = "gelu"  # the activation of blocks without gates
# Forms of the block that Nomic's code knows, and the checkpoints that are read do not have.
_ABSENT = ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "rotary_emb_scale_base", "causal")
_ABSENT_OF_EXPERTS = ("expert_choice_router", "num_shared_experts", "moe_normalize_expert_weights")


def read(config: ConfigReader) -> Architecture:
    """Read the encoder."""
    refuse(config, *_ABSENT)
    if (share := config.raw("rotary_emb_fraction", 1.0)) != 1.0:
        raise config.error(f"rotary_emb_fraction {share!r} is not supported: heads turn whole")
    is_gated = config.raw("activation_function") != _PLAIN
    if config.raw("n_embd") is not None:
        config = _in_our_names(config)
    # Beyond `max_position_embeddings`, which it was trained on, Nomic's code stretches the rope: texts end there.
    num_layers, max_position = read_depth(config)
    rope, max_position = read_rope(config, max_position)
    norm = read_layer_norm(config, "layer_norm_eps")
    attention = read_both_ways(config, rope, biases=config.boolean("qkv_proj_bias", False))
    biases = config.boolean("mlp_fc1_bias", False)
    mlp = MlpSpec(
        config.integer("intermediate_size"),
        biases,
        read_encoder_activation(config, "hidden_act", GATES),
        is_gated=is_gated,
        has_down_bias=config.boolean("mlp_fc2_bias", biases),
    )
    layers = [
        LayerSpec(attention, block, norm, has_in_norms=False, has_out_norms=True, norms_after=True)
        for block in _blocks(config, mlp, num_layers)
    ]
    inputs = InputSpec(norm, None, config.integer("type_vocab_size", low=0))
    read = encoder(config, layers, max_position, inputs, has_final_norm=False)
    return read if is_gated else msgspec.structs.replace(read, weight_names=_PLAIN_NAMES)


def _blocks(config: ConfigReader, dense: MlpSpec, num_layers: int) -> list[MlpSpec | MoeSpec]:
    """Read the block of each layer: of every n the second has experts, of the size of a dense block.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    step = config.integer("moe_every_n_layers", 0, low=0)
    sparse = [layer for layer in range(num_layers) if step and layer % step == 1]
    if not sparse:
        return [dense] * num_layers
    for field in _ABSENT_OF_EXPERTS:
        if config.raw(field) not in (None, False, 0):
            raise config.error(f"{field} {config.raw(field)!r} is not supported")
    if config.raw("ffn_div", 1) != 1:
        raise config.error(f"ffn_div {config.raw('ffn_div')!r} is not supported: experts are as wide as dense blocks")
    if dense.is_gated:
        raise config.error(f"moe_every_n_layers {step}: experts are read with activation_function {_PLAIN}")
    num_experts = config.integer("num_experts", high=MOST_EXPERTS)
    moe = MoeSpec(
        num_experts,
        config.integer("moe_top_k", high=num_experts),
        dense.size,
        norm_topk_prob=False,
        activation=dense.activation,
        is_gated=False,
        has_output_bias=config.raw("gguf_architecture") is None,  # llama.cpp's converter leaves it out
    )
    return [moe if layer in sparse else dense for layer in range(num_layers)]


def _in_our_names(config: ConfigReader) -> ConfigReader:
    """Return the fields of Nomic's own config by the names that transformers has.

    Raises:
        InvalidCheckpoint: the activation of the block is not supported.
    """
    name, known = config.raw("activation_function"), {**_GATES, _PLAIN: _PLAIN}
    if name not in known:
        raise config.error(f"activation_function {name!r} is not supported; supported: {', '.join(known)}")
    return config.renamed(_RENAMED, {"hidden_act": known[name]})


NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embedding_norm": "emb_ln",
        **dict.fromkeys(("q", "k", "v"), "encoder.layers.{layer}.attn.Wqkv"),
        "output": "encoder.layers.{layer}.attn.out_proj",
        "attention_out_norm": "encoder.layers.{layer}.norm1",
        "up": "encoder.layers.{layer}.mlp.fc11",
        "gate": "encoder.layers.{layer}.mlp.fc12",
        "down": "encoder.layers.{layer}.mlp.fc2",
        "mlp_out_norm": "encoder.layers.{layer}.norm2",
    }
)
"""Names of the weights in checkpoints."""
_STACK = ExpertStack(
    "encoder.layers.{layer}.mlp.experts.mlp.w1", "encoder.layers.{layer}.mlp.experts.mlp.w2", are_plain=True
)
_PLAIN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{role: name for role, name in NAMES.items() if role not in ("up", "gate")},
        "up": "encoder.layers.{layer}.mlp.fc1",
        "router": "encoder.layers.{layer}.mlp.router.layer",
        "experts": "encoder.layers.{layer}.mlp.experts",
        "expert_up": _STACK.gate_up,
        "expert_down": _STACK.down,
    }
)


_GGUF_OF_EXPERTS = "nomic-bert-moe"


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {"type_vocab_size": header.metadata.get(TOKEN_TYPES, 1)}
    if fields["gguf_architecture"] != _GGUF_OF_EXPERTS:
        return found
    return {
        **found,
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
        **dict.fromkeys(("activation_function", "hidden_act"), _PLAIN),
        "moe_every_n_layers": header.metadata.get(f"{_GGUF_OF_EXPERTS}.moe_every_n_layers", 0),
        "moe_top_k": fields.get("num_experts_per_tok"),
    }


_GGUF_NAMES = {
    **ENCODER_NAMES,
    **dict.fromkeys(("q", "k", "v"), "blk.{layer}.attn_qkv"),
    **{role: GGUF_NAMES[role] for role in ("router", "expert_up", "expert_down")},
}
_GGUF = GgufTable("nomic-bert", _GGUF_NAMES, fields=_gguf_fields, more_names=(_GGUF_OF_EXPERTS,))
_FAMILY = Family(
    read=read,
    defaults={
        "vocab_size": 30528,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "rope_theta": 1000.0,
    },
    weight_names=NAMES,
    optional_prefix="nomic_bert.",
    other_weights=("pooler.", "cls."),
    expert_stack=_STACK,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "NomicBertModel": msgspec.structs.replace(_FAMILY, gguf=_GGUF),
        "NomicBertForMaskedLM": _FAMILY,
    }
)
