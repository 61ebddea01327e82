"""Phi 3 and 4: fused names, a rope that turns a part of each head, LongRoPE by the context of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import load_oracle, make_checkpoint
from tests.model.models.test_logits import assert_close
from tests.paging import PagedRequests, make_attention
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.architecture.rope_spec import LongRopeScaling
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.architecture_config import read_architecture
from tokenmill.model.weights.checkpoint import read_architecture as read_folder
from tokenmill.model.weights.loader import load_model

ORIGINAL = 24
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 1.9, 2.3],
    "long_factor": [1.5, 2.0, 4.0, 9.0, 17.0, 40.0],
    "original_max_position_embeddings": ORIGINAL,
}
# As published with Phi-4-mini-instruct, without unread fields.
PHI4: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def test_the_published_config_has_the_size_of_transformers() -> None:
    architecture = read_architecture(PHI4)
    with torch.device("meta"):
        model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**PHI4, pad_token_id=0))
    assert architecture.num_parameters() == model.num_parameters()
    rope = architecture.layers[0].attention.rope
    assert rope is not None
    assert rope.num_rotated(128) == 96
    assert isinstance(rope.scaling, LongRopeScaling)
    assert rope.scaling.attention_factor == pytest.approx(1.1902380714238083)
    assert architecture.context_form == "long"
    assert architecture.for_context(4097).context_form == "long"
    assert architecture.for_context(4096).context_form == "short"


@pytest.mark.parametrize("is_long", [False, True])
def test_the_factors_are_those_of_transformers_for_such_a_context(
    is_long: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(
        tmp_path, "phi3", seed=int(rng.integers(2**31)), tokenizer=False, rope_parameters=LONG_ROPE, **PARTS
    )
    oracle = load_oracle(folder)
    architecture = read_folder(folder).for_context(60 if is_long else ORIGINAL)
    length = int(rng.integers(ORIGINAL + 1, 60) if is_long else rng.integers(1, ORIGINAL + 1))
    sequence = rng.integers(0, 331, length).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([sequence])).logits[0]
    decoder, requests = load_model(folder, architecture, TorchKernels("float32", "cpu")), None
    requests = PagedRequests([sequence], 4, rng)
    attention = make_attention("cpu", decoder.attention_spec, requests.num_pages, 4, torch.float32)
    (got,) = requests.run(decoder, attention, [[(0, 1)], *([[(0, length - 1)]] if length > 1 else [])])
    assert_close(got, want)


PARTS = {"num_attention_heads": 2, "num_key_value_heads": 1, "original_max_position_embeddings": ORIGINAL}


def test_the_engines_context_chooses_and_is_part_of_its_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "phi3", rope_parameters=LONG_ROPE, **PARTS)
    prompt, greedy = (
        {"prompt_token_ids": list(range(12))},
        SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
    )
    names, texts = set(), []
    for context in (ORIGINAL, 60):
        with LLM(folder, dtype="float32", num_pages=40, page_size=4, max_model_len=context) as llm:
            names.add(llm.info.fingerprint)
            texts.append(llm.generate([prompt], greedy)[0].outputs[0].token_ids)
    assert len(names) == 2
    assert texts[0] != texts[1]


def test_adapters_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "phi3")
    with pytest.raises(InvalidConfig, match="adapters of Phi3ForCausalLM are not supported"):
        LLM(folder, dtype="float32", num_pages=40, enable_lora=True)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    with pytest.raises(InvalidConfig, match="adapters of Phi3ForCausalLM are not supported"):
        LLM(folder, dtype="float32", num_pages=40, lora_merge=str(tmp_path / "adapter"))
