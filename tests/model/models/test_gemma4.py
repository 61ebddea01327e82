"""Gemma 4: heads by type of layer, shared KV, per-layer embeddings that are not loaded, the text half of the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import greedy_continuation, load_oracle, make_checkpoint, randomize, smallest_margin
from tests.model.models.test_logits import assert_close, load
from tests.paging import PagedRequests, make_attention
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.architecture_config import read_architecture
from tokenmill.model.quantization.packed import UNQUANTIZED
from tokenmill.model.sharding.shard import check_size
from tokenmill.model.weights.checkpoint import read_architecture as read_folder
from tokenmill.model.weights.loader import measure, plan_model
from tokenmill.platform.memory import Arena

# In the form of published configs: heads by type of layer. The sizes are of the order of the E2B model's.
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}


# The same of the dense 31B and of the 26B-A4B.
LARGE: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
    "max_position_embeddings": 262144,
}
SIZES: dict[str, dict[str, Any]] = {
    "31B": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "26B-A4B": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_form_of_a_large_config_has_the_size_of_transformers(name: str) -> None:
    config = LARGE | SIZES[name]
    fields = {field: value for field, value in config.items() if field != "architectures"}
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**fields))
    architecture = read_architecture(config)
    assert architecture.num_parameters() == model.num_parameters()
    full = config["num_hidden_layers"] // 6
    heads = 5 * config["num_key_value_heads"] * 256 + config["num_global_key_value_heads"] * 512
    assert architecture.kv_bytes_per_token(2) == 2 * 2 * full * heads
    check_size(architecture, 2)
    with pytest.raises(InvalidConfig, match="cannot be shared evenly"):
        check_size(architecture, 3)
    idle = sum(layer.mlp.num_idle_parameters(2816) for layer in architecture.layers if isinstance(layer.mlp, MoeSpec))
    assert (architecture.num_parameters() - idle) // 10**8 == {"31B": 306, "26B-A4B": 38}[name]


def test_a_published_form_of_config_has_the_size_of_transformers() -> None:
    fields = {name: value for name, value in CONFIG.items() if name != "architectures"}
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**fields))
    architecture = read_architecture(CONFIG)
    assert architecture.num_parameters() == model.num_parameters()
    assert architecture.num_mapped_parameters == model.model.embed_tokens_per_layer.weight.numel()
    # Three full layers and twelve sliding ones have KV of their own.
    assert architecture.kv_bytes_per_token(2) == 2 * 2 * (3 * 512 + 12 * 256)


def test_the_table_is_not_counted_as_memory(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma4", tokenizer=False)
    architecture = read_folder(folder)
    shapes, num_bytes = measure(architecture, TorchKernels("float32", "cpu"))
    tables = sum(one.num_bytes for one in shapes.rotary.values())
    scalars = len(architecture.layers)
    assert num_bytes - tables == 4 * (architecture.num_parameters() - architecture.num_mapped_parameters + scalars)


def test_weights_in_shared_memory_have_the_table_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma4", tokenizer=False, dtype=torch.bfloat16)
    kernels, _ = select_kernels("auto", "cpu", "bfloat16", 1, UNQUANTIZED)
    if kernels.name != "native":
        pytest.skip("the native kernels are not built here")
    plan = plan_model(folder, read_folder(folder), kernels)
    memory = np.zeros(sum(map(Arena.room, plan.sizes)), np.uint8)
    loaded, placed = plan.load(arena=Arena(memory)), plan.place(Arena(memory))
    assert loaded.per_layer is not None and placed.per_layer is not None
    assert loaded.per_layer.table is not None and placed.per_layer.table is not None
    assert np.array_equal(loaded.per_layer.table.values, placed.per_layer.table.values)


def test_the_text_half_of_a_model_with_a_tower(tmp_path: Path, rng: np.random.Generator) -> None:
    text = {
        "vocab_size": 331,
        "vocab_size_per_layer_input": 331,
        "hidden_size_per_layer_input": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "global_head_dim": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tower, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    oracle = transformers.Gemma4ForConditionalGeneration(config).eval()
    randomize(oracle, int(rng.integers(2**31)))
    oracle.save_pretrained(tmp_path)
    sequence = rng.integers(0, 331, 40).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([sequence])).logits[0]
    decoder, requests = load(tmp_path), PagedRequests([sequence], 16, rng)
    attention = make_attention("reference", decoder.attention_spec, requests.num_pages, 16, torch.float32)
    (got,) = requests.run(decoder, attention, [[(0, 25)], [(0, 15)]])
    assert_close(got, want)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_greedy_tokens_are_those_of_transformers_however_steps_are_cut(
    attention: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path, "gemma4", seed=int(rng.integers(2**31)))
    oracle = load_oracle(folder)
    prompts = [rng.integers(0, 300, int(length)).tolist() for length in rng.integers(1, 60, 4)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    expected = [greedy_continuation(oracle, prompt, 16) for prompt in prompts]
    # Few pages, so that requests are preempted; a prompt comes again, so that its pages are found.
    options = {"dtype": "float32", "num_pages": 24, "page_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(folder, attention_backend=attention, **options) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
                if smallest_margin(oracle, prompt, tokens) > 1e-4:
                    assert list(output.outputs[0].token_ids) == tokens


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(InvalidCheckpoint, match="use_bidirectional_attention 'all' is not supported"):
        read_architecture({**CONFIG, "use_bidirectional_attention": "all"})
    with pytest.raises(InvalidCheckpoint, match=r"per-layer embeddings \(E2B, E4B\) are not read from GGUF files"):
        read_architecture({**CONFIG, "gguf_architecture": "gemma4"})
    with pytest.raises(InvalidCheckpoint, match=r"top_k_experts \(9\) must not exceed num_experts \(8\)"):
        read_architecture({**CONFIG, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 9})
    with pytest.raises(InvalidCheckpoint, match="leaves no layer of a type that has KV"):
        read_architecture({**CONFIG, "num_kv_shared_layers": 32})
    for size, num_stages in ((2, 1), (1, 2)):
        with pytest.raises(InvalidConfig, match="per-layer embeddings runs in one process"):
            check_size(read_architecture(CONFIG), size, num_stages)
