"""The families as data: what their config.json does not say, or says in fields of their own, and the weights' names.

Adding a family is an entry here, and a layer part where it has one that no other family has. Knows no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tokenmill.model.architecture.architecture import LayerSpec, PerLayerSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models import gemma4_config, layer_kinds, lfm2_config, qwen3_next_config
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.weight_names import (
    GEMMA3_NAMES,
    GEMMA3_VL_NAMES,
    GEMMA4_NAMES,
    GEMMA4_VL_NAMES,
    GPT_OSS_NAMES,
    LFM2_NAMES,
    LLAMA_NAMES,
    PHI3_NAMES,
    QWEN3_5_NAMES,
    QWEN3_5_VL_NAMES,
    QWEN3_NEXT_NAMES,
    QWEN3_VL_NAMES,
)


@dataclass(frozen=True, slots=True)
class Family:
    """The facts that tell one family from another.

    Attributes:
        layers: reads all layers, where they differ in more than the facts below describe; None: these describe them.
        reads_ropes: reads all layers, where the config describes ropes in a way of its own.
        norm_eps: config field of the norms' epsilon.
        per_layer: reads the embeddings that each layer has of its own.
        caps_logits: the config may have `final_logit_softcapping`.
        windows: reads the sliding windows, one per layer.
        has_rope: reads which layers have a rotary embedding.
        qkv_bias, output_bias, mlp_bias: True or False when the family fixes it, else the config field that says it.
        head_norms: RMSNorm over each head of q and k.
        head_dim: config field `head_dim` when it is absent; None: hidden size / heads.
        has_experts: the config describes experts. has_sinks: heads of attention have sinks.
        experts: fields of `MoeSpec` that the family fixes.
        stacks_experts: checkpoints store all experts of a layer in one tensor.
        has_out_norms: the output of a block goes through a norm.
        norms_are_offsets: weights of norms are offsets from 1.
        activation: config field of the gate's activation.
        query_scalar: config field whose inverse square root is the scale of attention; None: heads' size is.
        scales_embeddings: embeddings are multiplied by the square root of the hidden size, rounded to the model's
            dtype.
        may_rotate_partly: the rope may turn a part of each head.
        local_theta: layers with a window have a rope of their own, with this base by default; None: they have none.
        refused: config fields that must be absent, null or false: they are not supported.
        text_config: the config of the decoder is a part of the file, if there is such a part.
        takes_images: a vision tower stands beside the decoder. other_weights: name prefixes of weights that are not the
            decoder's.
        has_multipliers: the config has the four multipliers of Granite; the scale of attention is one of them.
        defaults: values of fields that may be absent.
        weight_names: names of the weights in checkpoints.
        gguf: llama.cpp's name of the family; None: its GGUF files are not read.
        gguf_interleaves_heads: llama.cpp's converter puts the rows of q and k that rotate together side by side.
    """

    layers: Callable[[ConfigReader, int, RopeSpec], tuple[LayerSpec, ...]] | None = None
    reads_ropes: Callable[[ConfigReader, int], tuple[LayerSpec, ...]] | None = None
    norm_eps: str = "rms_norm_eps"
    per_layer: Callable[[ConfigReader], PerLayerSpec | None] | None = None
    caps_logits: bool = False
    windows: Callable[[ConfigReader, int], layer_kinds.Windows] = layer_kinds.no_windows
    has_rope: Callable[[ConfigReader, int], tuple[bool, ...]] = layer_kinds.every_layer
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    head_dim: int | None = None
    has_experts: bool = False
    has_sinks: bool = False
    experts: Mapping[str, Any] = field(default_factory=dict)
    stacks_experts: bool = False
    has_out_norms: bool = False
    norms_are_offsets: bool = False
    activation: str = "hidden_act"
    query_scalar: str | None = None
    scales_embeddings: bool = False
    may_rotate_partly: bool = False
    local_theta: float | None = None
    refused: tuple[str, ...] = ()
    text_config: bool = False
    takes_images: bool = False
    other_weights: tuple[str, ...] = ()
    has_multipliers: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    weight_names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    gguf: str | None = None
    gguf_interleaves_heads: bool = False


_GEMMA3 = Family(
    windows=layer_kinds.windows_but_every_sixth,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    head_norms=True,
    has_out_norms=True,
    norms_are_offsets=True,
    activation="hidden_activation",
    query_scalar="query_pre_attn_scalar",
    scales_embeddings=True,
    local_theta=10000.0,
    refused=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    weight_names=GEMMA3_NAMES,
    gguf="gemma3",
)

_GEMMA4 = Family(
    reads_ropes=gemma4_config.read_layers,
    per_layer=gemma4_config.read_per_layer,
    caps_logits=True,
    scales_embeddings=True,
    refused=("use_bidirectional_attention", "attention_k_eq_v", "enable_moe_block"),
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    weight_names=GEMMA4_NAMES,
)

_QWEN3_5 = Family(
    layers=qwen3_next_config.read_layers,
    norms_are_offsets=True,
    may_rotate_partly=True,
    other_weights=("mtp.", "model.visual."),
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
    },
    weight_names=QWEN3_5_NAMES,
    gguf="qwen35",
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": dataclasses.replace(
            _GEMMA3,
            text_config=True,
            other_weights=("vision_tower.", "multi_modal_projector."),
            weight_names=GEMMA3_VL_NAMES,
            gguf=None,
        ),
        "Gemma4ForCausalLM": _GEMMA4,
        "Gemma4ForConditionalGeneration": dataclasses.replace(
            _GEMMA4,
            text_config=True,
            other_weights=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
            weight_names=GEMMA4_VL_NAMES,
        ),
        "GptOssForCausalLM": Family(
            windows=layer_kinds.every_second_window,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            head_dim=64,
            has_experts=True,
            has_sinks=True,
            experts={"activation": "clamped", "has_biases": True, "norm_topk_prob": True},
            stacks_experts=True,
            defaults={
                "attention_bias": True,
                "num_hidden_layers": 36,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "vocab_size": 201088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "sliding_window": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
            weight_names=GPT_OSS_NAMES,
            gguf="gpt-oss",
        ),
        "GraniteForCausalLM": Family(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            has_multipliers=True,
            defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
            gguf="granite",
            gguf_interleaves_heads=True,
        ),
        "Lfm2ForCausalLM": Family(
            layers=lfm2_config.read_layers,
            norm_eps="norm_eps",
            defaults={
                "vocab_size": 65536,
                "hidden_size": 2560,
                "intermediate_size": 12288,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 128000,
                "norm_eps": 1e-5,
                "rope_theta": 1000000.0,
                "tie_word_embeddings": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            weight_names=LFM2_NAMES,
            gguf="lfm2",
        ),
        "LlamaForCausalLM": Family(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
            gguf="llama",
            gguf_interleaves_heads=True,
        ),
        "MistralForCausalLM": Family(
            windows=layer_kinds.one_window,
            defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "eos_token_id": 2},
        ),
        "Phi3ForCausalLM": Family(
            windows=layer_kinds.given_window,
            may_rotate_partly=True,
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "eos_token_id": 32000,
            },
            weight_names=PHI3_NAMES,
            gguf="phi3",
        ),
        "Qwen2ForCausalLM": Family(windows=layer_kinds.layered_windows, qkv_bias=True, gguf="qwen2"),
        "Qwen2_5_VLForConditionalGeneration": Family(
            windows=layer_kinds.layered_windows,
            qkv_bias=True,
            text_config=True,
            takes_images=True,
            other_weights=("visual.",),
            defaults={"rope_theta": 1000000.0, "rms_norm_eps": 1e-5},
        ),
        "Qwen3ForCausalLM": Family(
            windows=layer_kinds.layered_windows,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            head_norms=True,
            head_dim=128,
            gguf="qwen3",
        ),
        "Qwen3MoeForCausalLM": Family(
            windows=layer_kinds.switched_window,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            head_norms=True,
            has_experts=True,
            gguf="qwen3moe",
        ),
        "Qwen3NextForCausalLM": dataclasses.replace(
            _QWEN3_5,
            other_weights=("mtp.",),
            defaults={
                **_QWEN3_5.defaults,
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 48,
                "num_key_value_heads": 2,
                "num_experts": 512,
            },
            weight_names=QWEN3_NEXT_NAMES,
            gguf=None,
        ),
        "Qwen3_5ForCausalLM": _QWEN3_5,
        "Qwen3_5ForConditionalGeneration": dataclasses.replace(
            _QWEN3_5, text_config=True, weight_names=QWEN3_5_VL_NAMES, gguf=None
        ),
        "Qwen3VLForConditionalGeneration": Family(
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            head_norms=True,
            head_dim=128,
            text_config=True,
            takes_images=True,
            other_weights=("model.visual.",),
            defaults={"rope_theta": 500000.0, "max_position_embeddings": 128000},
            weight_names=QWEN3_VL_NAMES,
        ),
        "SmolLM3ForCausalLM": Family(
            windows=layer_kinds.windows_without_rope,
            has_rope=layer_kinds.rope_flags,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            defaults={
                "num_key_value_heads": 4,
                "rope_theta": 2000000.0,
                "tie_word_embeddings": True,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
            },
            gguf="smollm3",
            gguf_interleaves_heads=True,
        ),
    }
)
