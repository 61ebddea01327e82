"""config.json of real checkpoints, in the spelling of transformers 4 and 5, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.architecture.architecture import Architecture, SelfAttentionSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec, MoeSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.architecture.rope_spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from tokenmill.model.models.architecture_config import read_architecture
from tokenmill.model.models.families import FAMILIES

# As published with Qwen3-0.6B, Qwen2.5-0.5B, Llama 3.2 1B, Mistral 7B v0.1, Qwen3-30B-A3B, OLMo-2 1B,
# SmolLM3-3B and Granite 3.1 2B, without unread fields.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}

OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
# Not published: the defaults of transformers' class, which counts as many parameters.
ARCEE = {
    "architectures": ["ArceeForCausalLM"],
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}

SUPPORTED = ", ".join(sorted(FAMILIES))


def attention_of(architecture: Architecture) -> SelfAttentionSpec:
    """Return the attention of every layer, where they are all alike."""
    (one,) = {layer.attention for layer in architecture.layers}
    return one


def windows_of(config: dict[str, Any]) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in read_architecture(config).layers)


def sparse_layers(architecture: Architecture) -> list[int]:
    return [index for index, layer in enumerate(architecture.layers) if isinstance(layer.mlp, MoeSpec)]


@pytest.mark.parametrize(
    ("config", "parameters", "kv_bytes"),
    [
        (QWEN3, 596_049_920, 114_688),
        (QWEN2, 494_032_768, 12_288),
        (LLAMA, 1_235_814_400, 32_768),
        (MISTRAL, 7_241_732_096, 131_072),
        (QWEN3_MOE, 30_532_122_624, 98_304),
        (SMOLLM3, 3_075_098_624, 73_728),
        (GRANITE, 2_533_531_648, 81_920),
        (OLMO2, 1_484_916_736, 131_072),
        (ARCEE, 4_022_766_080, 327_680),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else None,
)
def test_published_configs_have_the_published_sizes(config: dict[str, Any], parameters: int, kv_bytes: int) -> None:
    architecture = read_architecture(config)
    assert architecture.num_parameters() == parameters
    assert architecture.kv_bytes_per_token(2) == kv_bytes


def test_qwen3_is_read_in_full() -> None:
    architecture = read_architecture(QWEN3)
    assert len(architecture.layers) == 28
    assert attention_of(architecture) == SelfAttentionSpec(
        num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5, rope=RopeSpec(1e6), head_norm=NormSpec(1e-6)
    )
    assert {layer.mlp for layer in architecture.layers} == {MlpSpec(3072)}
    assert architecture.tie_embeddings
    assert architecture.max_position == 40960
    assert (architecture.bos_token_id, architecture.eos_token_ids) == (151643, (151645,))
    assert architecture.dtype == "bfloat16"


def test_qwen2_has_qkv_biases_and_only_those() -> None:
    architecture = read_architecture(QWEN2)
    attention = attention_of(architecture)
    assert (attention.qkv_bias, attention.output_bias) == (True, False)
    assert not any(layer.mlp.bias for layer in architecture.layers)
    assert attention.head_dim == 64


def test_llama_biases_follow_the_config() -> None:
    architecture = read_architecture({**LLAMA, "attention_bias": True, "mlp_bias": True})
    attention = attention_of(architecture)
    assert (attention.qkv_bias, attention.output_bias) == (True, True)
    assert all(layer.mlp.bias for layer in architecture.layers)


def test_llama_has_its_rope_scaling_and_several_eos() -> None:
    architecture = read_architecture(LLAMA)
    assert attention_of(architecture).rope == RopeSpec(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert architecture.eos_token_ids == (128001, 128008, 128009)


def test_both_spellings_of_rope_and_dtype_read_the_same() -> None:
    old = {**LLAMA, "torch_dtype": "bfloat16"}
    new = {name: value for name, value in old.items() if name not in ("rope_scaling", "rope_theta", "torch_dtype")}
    new |= {"rope_parameters": {**LLAMA["rope_scaling"], "rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert read_architecture(old) == read_architecture(new)


def test_windows_per_family() -> None:
    assert windows_of(MISTRAL) == (4096,) * 32
    assert windows_of({**MISTRAL, "sliding_window": None}) == (None,) * 32
    assert windows_of({**QWEN2, "use_sliding_window": True}) == (None,) * 21 + (32768,) * 3
    layer_types = ["sliding_attention", "full_attention"] * 12
    alternating = {**QWEN2, "use_sliding_window": True, "layer_types": layer_types}
    assert windows_of(alternating) == (32768, None) * 12
    assert windows_of({**QWEN2, "layer_types": layer_types}) == (None,) * 24


def ropes_of(config: dict[str, Any]) -> list[bool]:
    return [layer.attention.rope is not None for layer in read_architecture(config).layers]


def test_a_rope_flag_per_layer() -> None:
    every_fourth = [True, True, True, False] * 9
    assert ropes_of(SMOLLM3) == every_fourth
    assert ropes_of({**SMOLLM3, "no_rope_layers": None}) == every_fourth
    assert ropes_of({**SMOLLM3, "no_rope_layers": None, "no_rope_layer_interval": 2}) == [True, False] * 18
    assert ropes_of({**SMOLLM3, "no_rope_layers": [0, 1] * 20}) == [False, True] * 18
    assert read_architecture(SMOLLM3).tie_embeddings
    sliding = {**SMOLLM3, "use_sliding_window": True, "sliding_window": 512}
    assert windows_of(SMOLLM3) == (None,) * 36
    assert windows_of(sliding) == (None, None, None, 512) * 9
    layer_types = ["sliding_attention"] * 35 + ["full_attention"]
    assert windows_of({**sliding, "layer_types": layer_types}) == (512,) * 35 + (None,)


def test_multipliers_of_granite() -> None:
    architecture = read_architecture(GRANITE)
    assert (architecture.embedding_multiplier, architecture.logits_scaling) == (12.0, 8.0)
    assert {layer.residual_multiplier for layer in architecture.layers} == {0.22}
    assert attention_of(architecture).scale == 1 / 64
    assert attention_of(read_architecture({**GRANITE, "attention_multiplier": None})).scale == 1.0


def test_dense_layers_among_sparse_ones() -> None:
    architecture = read_architecture({**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert sparse_layers(architecture) == list(range(3, 48, 2))
    assert architecture.layers[3].mlp == MoeSpec(128, 8, 768, True)
    assert architecture.layers[0].mlp == MlpSpec(6144)


def test_num_local_experts_is_the_new_name_of_num_experts() -> None:
    renamed = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"} | {"num_local_experts": 64}
    assert {layer.mlp for layer in read_architecture(renamed).layers} == {MoeSpec(64, 8, 768, True)}


def test_yarn_reaches_further_than_the_pretraining_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    architecture = read_architecture({**QWEN2, "rope_scaling": scaling})
    assert architecture.max_position == 131072
    rope = attention_of(architecture).rope
    assert rope is not None
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.attention_factor == pytest.approx(1.1386294)


def test_linear_scaling_in_the_oldest_spelling() -> None:
    architecture = read_architecture({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert attention_of(architecture).rope == RopeSpec(500000.0, LinearScaling(4.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported: " + ", ".join(sorted(FAMILIES)),
        ),
        ({"architectures": None}, "architectures must name"),
        ({"architectures": []}, "architectures must name"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu, gelu_pytorch_tanh"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling: short_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor must have 64 numbers, one for each frequency; got 1",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 0], "long_factor": [1.0]}},
            "short_factor must be above 0",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope per layer type is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "1024"}, "hidden_size must be an integer, got '1024'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, got True"),
        ({"num_key_value_heads": 5}, "num_attention_heads (16) must be a multiple of num_key_value_heads (5)"),
        ({"head_dim": 63}, "head_dim must be even, got 63"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer or a list of integers"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 28 names"),
        ({"layer_types": ["linear_attention"] * 28}, "layer_types has 'linear_attention'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        read_architecture({**QWEN3, **change}, "folder/config.json")
    assert str(raised.value).startswith("folder/config.json: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SMOLLM3, "no_rope_layers": [1] * 35}, "no_rope_layers must have a flag for each of 36 layers, got 35"),
        ({**SMOLLM3, "no_rope_layers": "1"}, "no_rope_layers must be an integer or a list of integers"),
        ({**SMOLLM3, "no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be at least 1"),
        ({**GRANITE, "residual_multiplier": 0}, "residual_multiplier must be above 0"),
        ({**GRANITE, "logits_scaling": "8"}, "logits_scaling must be a number"),
        ({**GRANITE, "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({**ARCEE, "hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: relu2"),
        ({**GRANITE, "architectures": ["GraniteMoeForCausalLM"]}, "GraniteMoeForCausalLM is not supported"),
        ({**GRANITE, "architectures": ["GraniteMoeSharedForCausalLM"]}, "ForCausalLM is not supported; supported: A"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variants_of_a_family_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        read_architecture(config)
    assert message in str(raised.value)


def test_more_experts_per_token_than_experts_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"num_experts_per_tok \(8\) must not exceed num_experts \(4\)"):
        read_architecture({**QWEN3_MOE, "num_experts": 4})
