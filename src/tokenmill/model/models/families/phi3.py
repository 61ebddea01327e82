"""Phi 3 and 4-mini: projections of one input in one matrix, a rope that turns a part of each head, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.models.attention_config import read_attention, with_windows
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GGUF_NAMES, GgufHeader, GgufTable
from tokenmill.model.models.layer_kinds import one_window
from tokenmill.model.models.mlp_config import read_mlp
from tokenmill.model.models.weight_names import LLAMA_NAMES


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm, mlp = read_frame(config, may_rotate_partly=True), read_norm(config), read_mlp(config)
    # Absent means "no window" here.
    has_window = config.has("sliding_window")
    windows = one_window(config, frame.num_layers) if has_window else (None,) * frame.num_layers
    attentions = with_windows(read_attention(config, frame.rope), windows)
    return decoder(config, [LayerSpec(one, mlp, norm) for one in attentions], frame.max_position)


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return LongRoPE's factors, which are tensors, and how much of a head turns, a number of its own."""
    found: dict[str, Any] = {}
    rotated, head_dim = header.metadata.get("phi3.rope.dimension_count"), fields.get("head_dim")
    if rotated and (head_dim or fields.get("num_attention_heads")):
        found["partial_rotary_factor"] = rotated / (head_dim or fields["hidden_size"] // fields["num_attention_heads"])
    factors = {kind: header.floats(f"rope_factors_{kind}.weight") for kind in ("short", "long")}
    if any(numbers is not None for numbers in factors.values()):
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        scaling |= {f"{kind}_factor": numbers for kind, numbers in factors.items() if numbers is not None}
        original = header.metadata.get("phi3.rope.scaling.original_context_length")
        attention = header.metadata.get("phi3.rope.scaling.attn_factor")
        found |= {"rope_scaling": scaling, "original_max_position_embeddings": original}
        scaling |= {} if attention is None else {"attention_factor": attention}
    return found


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Phi3ForCausalLM": Family(
            read=read,
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "eos_token_id": 32000,
            },
            weight_names={
                **LLAMA_NAMES,
                **dict.fromkeys(("q", "k", "v"), "model.layers.{layer}.self_attn.qkv_proj"),
                **dict.fromkeys(("gate", "up"), "model.layers.{layer}.mlp.gate_up_proj"),
            },
            gguf=GgufTable(
                "phi3",
                {
                    **GGUF_NAMES,
                    **dict.fromkeys(("q", "k", "v"), "blk.{layer}.attn_qkv"),
                    **dict.fromkeys(("gate", "up"), "blk.{layer}.ffn_up"),
                },
                fields=_gguf_fields,
            ),
        )
    }
)
