"""BERT (Devlin et al. 2019), also MiniLM, bge, e5 and gte; and RoBERTa (Liu et al. 2019), whose positions are counted.

XLM-RoBERTa (bge-m3, multilingual e5) and CamemBERT are RoBERTa with other vocabularies. Heads that a checkpoint has
besides are left out: those of the training task, and the pooler, which sentence vectors are not made by.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.encoder_config import read_bert
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import ENCODER_NAMES, TOKEN_TYPES, GgufHeader, GgufTable

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
        "q": "encoder.layer.{layer}.attention.self.query",
        "k": "encoder.layer.{layer}.attention.self.key",
        "v": "encoder.layer.{layer}.attention.self.value",
        "output": "encoder.layer.{layer}.attention.output.dense",
        "attention_out_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
        "up": "encoder.layer.{layer}.intermediate.dense",
        "down": "encoder.layer.{layer}.output.dense",
        "mlp_out_norm": "encoder.layer.{layer}.output.LayerNorm",
    }
)
"""Names of BERT's weights, without what stands before them where a head stands beside."""


def read_roberta(config: ConfigReader) -> Architecture:
    """Read an encoder whose positions are counted behind the id of padding."""
    return read_bert(config, pads_positions=True)


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation and the types of tokens. RoBERTa's files have the positions of padding cut off."""
    return {"hidden_act": "gelu", "type_vocab_size": header.metadata.get(TOKEN_TYPES, 1)}


_BERT = Family(
    read=read_bert,
    defaults={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    },
    weight_names=NAMES,
    optional_prefix="bert.",
    other_weights=("pooler.", "cls.", "embeddings.position_ids"),
)
_ROBERTA = msgspec.structs.replace(
    _BERT,
    read=read_roberta,
    defaults={**_BERT.defaults, "vocab_size": 50265, "pad_token_id": 1},
    optional_prefix="roberta.",
    other_weights=("pooler.", "lm_head.", "embeddings.position_ids"),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "BertModel": msgspec.structs.replace(_BERT, gguf=GgufTable("bert", ENCODER_NAMES, fields=_gguf_fields)),
        "BertForMaskedLM": _BERT,
        **dict.fromkeys(("RobertaModel", "RobertaForMaskedLM", "CamembertModel"), _ROBERTA),
        **dict.fromkeys(("XLMRobertaModel", "XLMRobertaForMaskedLM"), _ROBERTA),
    }
)
