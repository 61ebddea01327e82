"""Requests behind a common prefix, whose pages attention reads for all of them at once, answer as each does alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tokenmill import LLM, SamplingParams
from tokenmill.model.attention.backends.native import NativeAttention, NativePlan
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=2),
]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, {"kv_cache_dtype": "int8", "page_size": 32}),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, {"kv_cache_dtype": "int4"}),
        ({"use_sliding_window": True, "sliding_window": 700, "max_window_layers": 0}, {"async_scheduling": True}),
    ],
)
def test_tokens_and_probabilities_are_those_of_each_request_alone(
    shape: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = []
    plan = NativeAttention.plan

    def recorded(self: NativeAttention, batch: ForwardBatch) -> NativePlan:
        made = plan(self, batch)
        shared.append(made.step.shared_splits)
        return made

    monkeypatch.setattr(NativeAttention, "plan", recorded)
    folder = make_checkpoint(
        tmp_path, "qwen3", seed=int(rng.integers(1000)), dtype=torch.bfloat16, max_position_embeddings=2048, **shape
    )
    prefix = rng.integers(0, 250, 1100).tolist()
    prompts = [prefix + rng.integers(0, 250, 1 + int(rng.integers(40))).tolist() for _ in range(3)]
    prompts += [prefix[:600] + rng.integers(0, 250, 30).tolist() for _ in range(2)]
    params = [PARAMS[i % 2] for i in range(len(prompts))]
    answers = []
    for cached, threads in ((False, 1), (True, 2)):
        with LLM(folder, dtype="bfloat16", num_threads=threads, enable_prefix_caching=cached, **options) as llm:
            if cached:
                llm.generate(prefix, SamplingParams(max_tokens=1), use_tqdm=False)
                shared.clear()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert all(output.num_cached_tokens >= 512 for output in outputs)
            else:
                pairs = zip(prompts, params, strict=True)
                outputs = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in pairs]
                assert not any(map(any, shared))
        answers.append([(one.token_ids, one.logprobs) for output in outputs for one in output.outputs])
    assert answers[0] == answers[1]
    assert max(shared, key=sum) == [2, 2, 2, 1, 1]
