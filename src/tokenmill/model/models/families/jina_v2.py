"""Jina's v2 (Günther et al. 2023: jina-embeddings-v2): BERT with ALiBi in the place of positions, and a gated block.

Of two forms, that of jina-embeddings-v2-base-code norms all heads of q and k, and adds the attention's input twice.
Both are named `JinaBertModel`; they differ by the code that config.json points to.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.input_spec import InputSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import read_depth, refuse
from tokenmill.model.models.encoder_config import ACTIVATIONS, encoder, read_both_ways, read_layer_norm
from tokenmill.model.models.families.bert import NAMES as BERT_NAMES
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import ENCODER_NAMES, GGUF_NAMES, TOKEN_TYPES, GgufHeader, GgufTable

# The only values that are read.
_FORM = {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "hidden_act": "gelu"}
# Part of the address of the code that norms q and k; the field that stands for it where a file has such norms.
_NORMS_HEADS = "qk-post-norm"
_GGUF_NORMS_HEADS = "gguf_norms_heads"


def read(config: ConfigReader) -> Architecture:
    """Read the encoder."""
    refuse(config, "is_decoder", "add_cross_attention")
    for field, supported in _FORM.items():
        if config.raw(field) != supported:
            raise config.error(f"{field} {config.raw(field)!r} is not supported; supported: {supported}")
    num_layers, max_position = read_depth(config)
    norm, norms_heads = read_layer_norm(config, "layer_norm_eps"), _norms_heads(config)
    attention = msgspec.structs.replace(
        read_both_ways(config), has_alibi=True, joint_norm=norm if norms_heads else None
    )
    activation = ACTIVATIONS[_FORM["hidden_act"]]
    mlp = MlpSpec(config.integer("intermediate_size"), False, activation, has_down_bias=True)
    layer = LayerSpec(
        attention,
        mlp,
        norm,
        has_in_norms=False,
        has_out_norms=True,
        norms_after=True,
        norms_attention_twice=norms_heads,
    )
    inputs = InputSpec(norm, None, config.integer("type_vocab_size"))
    read = encoder(config, [layer] * num_layers, max_position, inputs, has_final_norm=False)
    return msgspec.structs.replace(read, weight_names=_NAMES_OF_CODE) if norms_heads else read


def _norms_heads(config: ConfigReader) -> bool:
    """Return True for the form with norms of q and k, by the code that config.json points to or by a file's tensors."""
    if config.raw(_GGUF_NORMS_HEADS):
        return True
    classes = config.raw("auto_map")
    names = [config.raw("_name_or_path"), *(classes.values() if isinstance(classes, dict) else ())]
    return any(_NORMS_HEADS in name for name in names if isinstance(name, str))


_SHARED = {role: name for role, name in BERT_NAMES.items() if role not in ("positions", "up", "down", "mlp_out_norm")}
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **_SHARED,
        **dict.fromkeys(("gate", "up"), "encoder.layer.{layer}.mlp.gated_layers"),
        "down": "encoder.layer.{layer}.mlp.wo",
        "mlp_out_norm": "encoder.layer.{layer}.mlp.layernorm",
    }
)
_NAMES_OF_CODE: Mapping[str, str] = MappingProxyType(
    {
        **_SHARED,
        "q_norm": "encoder.layer.{layer}.attention.self.layer_norm_q",
        "k_norm": "encoder.layer.{layer}.attention.self.layer_norm_k",
        "attention_last_norm": "encoder.layer.{layer}.layer_norm_1",
        **dict.fromkeys(("up", "gate"), "encoder.layer.{layer}.mlp.up_gated_layer"),
        "down": "encoder.layer.{layer}.mlp.down_layer",
        "mlp_out_norm": "encoder.layer.{layer}.layer_norm_2",
    }
)


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    norm = header.floats(f"{_GGUF_NAMES['q_norm'].format(layer=0)}.weight")
    return {**_FORM, "type_vocab_size": header.metadata.get(TOKEN_TYPES, 2), _GGUF_NORMS_HEADS: norm is not None}


_GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **ENCODER_NAMES,
        **{role: GGUF_NAMES[role] for role in ("q_norm", "k_norm")},
        "attention_last_norm": "blk.{layer}.attn_norm_2",
    }
)
_FAMILY = Family(
    read=read,
    defaults={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "feed_forward_type": "geglu",
        "max_position_embeddings": 8192,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    },
    weight_names=_NAMES,
    optional_prefix="bert.",
    other_weights=("pooler.", "cls.", "embeddings.position_ids"),
)

# The two halves of a gated product are one tensor as in checkpoints, or, by converters of 2024, two.
_GGUF = GgufTable("jina-bert-v2", _GGUF_NAMES, fields=_gguf_fields, joined={"gate": _GGUF_NAMES["up"]})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"JinaBertModel": msgspec.structs.replace(_FAMILY, gguf=_GGUF), "JinaBertForMaskedLM": _FAMILY}
)
