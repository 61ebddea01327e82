"""Steps of the native engine call nothing of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.runner.torch_calls import torch_calls_of_steps
from tests.model.models.test_native_decoder import FAMILIES
from tokenmill import LLM, SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.demo import demo_model_path
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kernels": "native",
    "num_threads": 1,
    "async_scheduling": False,
    "attention_backend": "native",
    "page_size": 16,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "num_pages": 64,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
SCHEMA = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}})
# All that a row may ask of the sampler, of its prompt's report, and of a grammar.
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"logprobs": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 7},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 0},
    {"logit_bias": {5: 2.0}, "min_tokens": 4, "allowed_token_ids": [5, 6, 7, 8]},
    {"bad_words": ["the"], "prompt_logprobs": 2},
    {"structured_outputs": SCHEMA},
]


def calls_of_demo(patch: pytest.MonkeyPatch) -> set[str]:
    """Every wish together, cut into chunks, with drafts from the text, and vectors of prompts."""
    with LLM(demo_model_path(), speculative_config=DRAFTS, **OPTIONS) as llm, torch_calls_of_steps(patch) as found:
        params = [SamplingParams(max_tokens=8, **wishes) for wishes in WISHES]
        prompts = [[9, 8, 7, 6] * 5 for _ in params]
        llm.generate(prompts, params, use_tqdm=False)
        llm.embed(prompts[:2], use_tqdm=False)
    return found


def calls_of_family(patch: pytest.MonkeyPatch, folder: Path, family: str) -> set[str]:
    make_checkpoint(folder, family, seed=3, **{"hidden_size": 64, "intermediate_size": 96, **FAMILIES[family]})
    with LLM(folder, **OPTIONS) as llm, torch_calls_of_steps(patch) as found:
        params = [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=3)]
        llm.generate([[9, 8, 7] * 15, [4, 5]], params, use_tqdm=False)
    return found


def all_calls(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    found = calls_of_demo(patch)
    for family in FAMILIES:
        found |= calls_of_family(patch, folder / family, family)
    return found


def test_steps_call_nothing_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert all_calls(monkeypatch, tmp_path) == set()
