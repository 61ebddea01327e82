"""Small random checkpoints in the Hugging Face layout, made fresh by the tests that need them.

`make_checkpoint` writes a whole folder: config.json, safetensors, generation_config.json, a byte-level BPE tokenizer
that encodes any text, and a ChatML chat template. `load_oracle` opens the same folder with transformers, the oracle.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = (
    "qwen3",
    "qwen2",
    "llama",
    "mistral",
    "qwen3_moe",
    "smollm3",
    "granite",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "phi3",
    "gpt_oss",
    "lfm2",
    "lfm2_moe",
    "granite_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "olmo2",
    "arcee",
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 331

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# By name: transformers takes seconds to load the code of all of them.
_CLASSES = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_moe": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "arcee": ("ArceeConfig", "ArceeForCausalLM"),
}

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

_QWEN3_NEXT_SHAPE: dict[str, Any] = {
    "rms_norm_eps": 1e-2,  # what is nearly nothing stays so: its rounding errors are not blown up
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}

_QWEN3_NEXT_EXPERTS: dict[str, Any] = {
    **_QWEN3_NEXT_SHAPE,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

_FAMILY_SHAPE: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "smollm3": {"num_hidden_layers": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.6,
    },
    "gemma3": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    "gemma4": {
        "num_hidden_layers": 5,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE + 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "sliding_window": 9,
        "final_logit_softcapping": 3.0,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
        "tie_word_embeddings": True,
    },
    # The shape of the 26B-A4B. What is nearly nothing stays so: its rounding errors are not blown up.
    "gemma4_moe": {
        "rms_norm_eps": 1e-2,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "sliding_window": 9,
        "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "hidden_size": 64,
        "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.3,
    },
    "granite_hybrid": {
        "rms_norm_eps": 1e-2,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.6,
    },
    "qwen3_5": _QWEN3_NEXT_SHAPE,
    "qwen3_5_moe": _QWEN3_NEXT_EXPERTS,
    "qwen3_next": _QWEN3_NEXT_EXPERTS,
    "phi3": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
}

_CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps in the shade of the old mill",
    "a mill that grinds tokens: user asks, assistant answers, system watches; hello world, one two three four five",
    "in the beginning there was the word, and the word was with the others, on and on and on",
]


def make_checkpoint(
    folder: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a small random checkpoint and return its folder (made if needed).

    Args:
        family: one of `FAMILIES`.
        max_shard_size: such as "20KB" to get several shards and an index.
        tokenizer: also write the tokenizer; needs a vocab_size of at least 259.
        overrides: fields of the family's transformers config. EOS is `<|im_end|>` unless `eos_token_id` is given.
    """
    transformers.utils.logging.disable_progress_bar()
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[family])
    fields = {**_SHAPE, **_FAMILY_SHAPE.get(family, {}), **overrides}
    folder.mkdir(parents=True, exist_ok=True)
    special_ids = make_tokenizer(folder, fields["vocab_size"]) if tokenizer else {}
    for name, token in (("eos_token_id", "<|im_end|>"), ("pad_token_id", "<|endoftext|>")):
        fields.setdefault(name, special_ids.get(token))
    fields.setdefault("bos_token_id", None)
    model = model_class(config_class(**fields))
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        eos = [special_ids["<|im_end|>"], special_ids["<|endoftext|>"]]
        _write_json(
            folder / "generation_config.json",
            {"eos_token_id": eos, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
        )
    return folder


def architecture_of(family: str) -> str:
    """The name that config.json has for one of `FAMILIES`."""
    return _CLASSES[family][1]


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The checkpoint as a transformers model of `dtype`: eager attention and experts, eval mode."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **eager).eval()


@torch.no_grad()
def nudged(oracle: torch.nn.Module) -> torch.nn.Module:
    """A copy whose weights are each off by up to one unit in the last place of a float32."""
    copied = copy.deepcopy(oracle)
    for weight in copied.parameters():
        weight.mul_(1 + torch.empty_like(weight).uniform_(-1, 1) * torch.finfo(torch.float32).eps)
    return copied


def greedy_continuation(oracle: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The oracle's greedy tokens after a prompt, EOS ignored."""
    ids = torch.tensor([prompt])
    # Without the mask, transformers would guess it from the padding id, which a random prompt may contain.
    answer = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


@torch.no_grad()
def smallest_margin(oracle: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> float:
    """Return the oracle's smallest lead of its first choice over its second; rounding decides below 1e-4."""
    logits = oracle(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    return float((first - second).min())


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter a value that matters: norms are not 1, biases not 0, logits well apart."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif name.endswith("A_log"):
            parameter.copy_(noise - 2)  # a state forgets slowly, as trained ones do
        elif name.endswith("bias"):
            parameter.copy_(0.2 * noise)
        else:
            parameter.copy_(1 + 0.2 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(0.5 + torch.rand(1, generator=generator))
        elif name.endswith("expert_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def make_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json; returns the ids of the special tokens.

    Ids `0..255` are bytes, then merges, then `SPECIAL_TOKENS`; at most `vocab_size` in all.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(f"a byte-level tokenizer needs {tokenizer.get_vocab_size()} ids, the model has {vocab_size}")
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )
    return {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
