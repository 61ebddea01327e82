"""Gemma 3: published sizes, configs older than transformers 5, the text half of the models with a vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import greedy_continuation, make_checkpoint, randomize, smallest_margin
from tests.model.models.test_logits import assert_close, load
from tests.paging import PagedRequests, make_attention
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.architecture.rope_spec import LinearScaling, RopeSpec
from tokenmill.model.models.architecture_config import read_architecture

# As published with gemma-3-270m, -1b and -4b, without unread fields; the last one leaves out what is the default.
SMALL = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
MIDDLE = {**SMALL, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26}
LARGE: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize("config", [SMALL, MIDDLE, LARGE], ids=["270M", "1B", "4B"])
def test_published_configs_have_the_sizes_of_transformers(config: dict[str, Any]) -> None:
    fields = config.get("text_config", config)
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**fields))
    architecture = read_architecture(config)
    assert architecture.num_parameters() == model.num_parameters()
    windows = [layer.attention.window for layer in architecture.layers]
    assert [window is None for window in windows] == [kind == "full_attention" for kind in model.config.layer_types]


def test_layers_with_a_window_have_a_rope_of_their_own() -> None:
    ropes = [layer.attention.rope for layer in read_architecture(LARGE).layers]
    assert ropes[:6] == [RopeSpec(10000.0)] * 5 + [RopeSpec(1e6, LinearScaling(8.0))]
    assert read_architecture(LARGE).eos_token_ids == (1, 106)


def test_the_text_half_of_a_model_with_a_tower(tmp_path: Path, rng: np.random.Generator) -> None:
    text = {
        "vocab_size": 331,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 9,
        "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**tower, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    oracle = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(oracle, int(rng.integers(2**31)))
    oracle.save_pretrained(tmp_path)
    sequence = rng.integers(0, 331, 40).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([sequence])).logits[0]
    decoder, requests = load(tmp_path), PagedRequests([sequence], 16, rng)
    attention = make_attention("reference", decoder.attention_spec, requests.num_pages, 16, torch.float32)
    (got,) = requests.run(decoder, attention, [[(0, 25)], [(0, 15)]])
    assert_close(got, want)


def test_greedy_tokens_are_those_of_transformers_however_steps_are_cut(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path, "gemma3", seed=int(rng.integers(2**31)))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [rng.integers(0, 300, int(length)).tolist() for length in rng.integers(1, 60, 6)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [greedy_continuation(oracle, prompt, 24) for prompt in prompts]
    # Few pages, so that requests are preempted; a prompt comes again, so that its pages are found.
    options = {"dtype": "float32", "num_pages": 24, "page_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(folder, **options) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
                if smallest_margin(oracle, prompt, tokens) > 1e-4:
                    assert list(output.outputs[0].token_ids) == tokens


def test_what_is_not_built_is_refused_by_name() -> None:
    changes = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    for field, value in changes.items():
        with pytest.raises(InvalidCheckpoint, match=f"{field} {value} is not supported"):
            read_architecture({**SMALL, field: value})
