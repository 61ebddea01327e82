"""The larger Gemma 4 with images: their tokens see each other in layers with a window, in others they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from tests.model.kernels.gpu import DEVICE
from tests.model.vision.checks import check_answers, check_gpu, check_logprobs, check_native_pass, request_of
from tests.model.vision.test_gemma4 import answer_of, processed
from tests.model.vision.test_llm import GREEDY, chat, picture
from tests.vision_checkpoints import GEMMA4_LARGE, GEMMA4_TOKENS, load_vision_oracle, make_gemma4_checkpoint
from tokenmill import LLM
from tokenmill.core.errors import InvalidRequest
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.weights.checkpoint import read_architecture

# Room for one image, and hardly more: all else of a prompt is cut.
ONE_IMAGE: dict[str, Any] = {"max_num_batched_tokens": GEMMA4_TOKENS + 2, "max_num_seqs": 4, "page_size": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma4_checkpoint(tmp_path_factory.mktemp("gemma4"), clips=False, **GEMMA4_LARGE)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    return load_vision_oracle(checkpoint)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**ONE_IMAGE, "encoder_budget": GEMMA4_TOKENS},
        {**ONE_IMAGE, "num_pages": 80, "max_model_len": 200, "admission": "optimistic"},
        {"disable_hybrid_kv_cache_manager": True, "page_size": 4},
        {"attention_backend": "reference", "enable_prefix_caching": False},
    ],
)
def test_answers_are_those_of_transformers_however_prompts_are_cut(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator, options: dict[str, Any]
) -> None:
    check_answers(checkpoint, rng, options, lambda prompt, images: answer_of(oracle, prompt, images))


@torch.no_grad()
def test_logprobs_are_those_of_transformers(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    image = picture(rng, 64, 96)

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        types = (ids == oracle.config.image_token_id).int()
        logits = oracle(ids, mm_token_type_ids=types, **processed([image])).logits[0].log_softmax(-1)
        causal = oracle(ids, mm_token_type_ids=0 * types, **processed([image])).logits[0].log_softmax(-1)
        assert (logits - causal).abs().max() > 1e-2  # what is seen ahead counts
        return logits

    check_logprobs(checkpoint, image, logits_of)


def test_only_layers_with_a_window_see_ahead(checkpoint: Path) -> None:
    architecture = read_architecture(checkpoint)
    assert architecture.spans_see_ahead
    seen = [(one.window is not None, one.spans_see_ahead) for one in architecture.attentions]
    assert {first == second for first, second in seen} == {True} and len(set(seen)) == 2
    text = architecture.without_media()
    assert not text.spans_see_ahead
    assert msgspec.structs.replace(text, takes_images=True) == architecture


def test_an_image_larger_than_a_step_is_refused(checkpoint: Path, rng: np.random.Generator) -> None:
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 2}
    refusal = pytest.raises(InvalidRequest, match=r"is run in one step, and a step runs 24 \(--max-num")
    with LLM(checkpoint, dtype="float32", num_pages=100, **small) as llm, refusal:
        llm.chat(chat(picture(rng, 96, 96), "hello"), GREEDY)


@pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
def test_the_native_pass_is_close_to_torch_however_prompts_are_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    # Every token has all experts: that another rounding chooses others would move rows far.
    all_experts = {"num_experts": 3, "top_k_experts": 3}
    folder = make_gemma4_checkpoint(tmp_path, dtype=torch.bfloat16, clips=False, **GEMMA4_LARGE | all_experts)
    check_native_pass(folder, rng, ONE_IMAGE | {"page_size": 16})


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
def test_an_engine_on_a_gpu_tells_what_one_on_a_cpu_tells(checkpoint: Path, rng: np.random.Generator) -> None:
    spec = read_vision(checkpoint)
    assert spec is not None
    check_gpu(checkpoint, [request_of(spec, rng, number, count * [(3, 3)]) for number, count in enumerate([1, 0, 2])])
