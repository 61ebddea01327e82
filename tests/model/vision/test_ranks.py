"""Images, videos and sound over ranks and stages: the bits of one process; rank 0 encodes, and tells the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.audio_checkpoints import make_audio_checkpoint, noise
from tests.model.audio.test_llm import chat as heard
from tests.model.vision.test_llm import chat, picture
from tests.model.vision.test_videos import chat as watched
from tests.model.vision.test_videos import clip
from tests.vision_checkpoints import (
    make_gemma3_checkpoint,
    make_moe_checkpoint,
    make_qwen25_checkpoint,
    make_vision_checkpoint,
)
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.kernels.native import load_kernels

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here"),
]

PARAMS = SamplingParams(max_tokens=6, temperature=0.7, seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=0)
Chat = list[dict[str, object]]
SMALL = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
TWO, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


def images(rng: np.random.Generator) -> list[Chat]:
    first, second = picture(rng, 96, 96), picture(rng, 64, 64)
    return [chat(first, "hello"), chat("two: ", first, second), chat("none"), chat(second, "well")]


def videos(rng: np.random.Generator) -> list[Chat]:
    return [*images(rng), watched(clip(rng, 4, 60, 60), "hello", fps=0.5)]


def clips(rng: np.random.Generator) -> list[Chat]:
    first, second = noise(rng, 0.9), noise(rng, 2.0)
    return [heard(first, "hello"), heard("two: ", first, second), heard("none")]


# A checkpoint, what it is asked, and how it is divided.
CASES: dict[str, tuple[Callable[..., Path], Callable[[np.random.Generator], list[Chat]], dict[str, Any]]] = {
    "deepstack, ranks": (make_vision_checkpoint, videos, TWO),
    "experts, ranks that share them, int8": (
        make_moe_checkpoint,
        images,
        {**TWO, "enable_expert_parallel": True, "quantization": "int8"},
    ),
    "times, ranks in two stages": (make_qwen25_checkpoint, videos, {**TWO, **STAGES}),
    "images that see ahead, ranks": (partial(make_gemma3_checkpoint, **SMALL), images, TWO),
    "images that see ahead, stages": (partial(make_gemma3_checkpoint, **SMALL), images, STAGES),
    "sound, ranks": (make_audio_checkpoint, clips, TWO),
}


def told(folder: Path, asked: list[Chat], **options: Any) -> list[Any]:
    sizes = {"num_pages": 200, "num_threads": 1, "page_size": 16, "max_num_batched_tokens": 30, "max_num_seqs": 4}
    with LLM(folder, weight_cache=False, **sizes, **options) as llm:
        # The second time out of the caches.
        outputs = [*llm.chat(asked, PARAMS), *llm.chat(asked, PARAMS)]
    return [(list(one.outputs[0].token_ids), one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


@pytest.mark.parametrize("case", CASES)
def test_ranks_and_stages_have_the_bits_of_one_process(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    make, ask, options = CASES[case]
    folder, asked = make(tmp_path / "model", dtype=torch.bfloat16), ask(rng)
    whole = {name: value for name, value in options.items() if not name.endswith(("_parallel", "_parallel_size"))}
    assert told(folder, asked, **options) == told(folder, asked, **whole)


def test_torch_is_close_over_ranks(tmp_path: Path, rng: np.random.Generator) -> None:
    folder, asked = make_vision_checkpoint(tmp_path / "model"), images(rng)
    found, expected = told(folder, asked, dtype="float32", **TWO), told(folder, asked, dtype="float32")
    assert [one[0] for one in found] == [one[0] for one in expected]


def test_a_first_stage_without_room_for_deepstack_is_refused(tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(InvalidConfig, match="3 layers add to an image's tokens, and the first stage has"):
        LLM(folder, num_pages=50, num_threads=1, **STAGES)


def test_contexts_over_ranks_are_refused(tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(InvalidConfig, match="--context-parallel-size"):
        LLM(folder, num_pages=50, num_threads=1, context_parallel_size=2)
