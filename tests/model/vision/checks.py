"""Check families with images: against an oracle, the native pass beside torch, an engine on a GPU beside a CPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same, told
from tests.model.vision.test_llm import GREEDY, NUM_TOKENS, chat, picture, tokens
from tokenmill import LLM, SamplingParams
from tokenmill.config.configs import EngineConfig
from tokenmill.core.media import MediaInput, MediaSpan, content_digest, with_surrogates
from tokenmill.core.messages import AddRequest
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.startup.assembly.setup import build_engine

Images = Sequence[Image.Image]
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_pages": 80, "page_size": 4}
SMALL |= {"max_model_len": 64, "dtype": "float32", "num_threads": 1, "device": "cpu"}


def check_answers(
    checkpoint: Path,
    rng: np.random.Generator,
    options: dict[str, Any],
    expected: Callable[[list[int], Images], list[int]],
) -> None:
    """Check answers to chats of no, one and two images, asked twice; `expected`: of a prompt's tokens and images."""
    first, second = picture(rng, 70, 120), picture(rng, 140, 90)
    chats = [chat(first, "hello"), chat("two: ", first, second, "?"), chat("no image"), chat(second, first)]
    shown = [[first], [first, second], [], [second, first]]
    with LLM(checkpoint, **{"dtype": "float32", "num_pages": 200} | options) as llm:
        for _ in range(2):  # pages are found again
            for output, images in zip(llm.chat(chats, GREEDY), shown, strict=True):
                assert tokens(output) == expected(output.prompt_token_ids, images)


def check_logprobs(checkpoint: Path, image: Image.Image, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Check the log probabilities of a prompt with an image; `expected`: [tokens, vocabulary] of ids [1, tokens]."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, prompt_logprobs=1)
    with LLM(checkpoint, dtype="float32", num_pages=50) as llm:
        (output,) = llm.chat(chat("see", image, "what is it"), params)
    logits = expected(torch.tensor([output.prompt_token_ids]))
    for position, token_id in enumerate(output.prompt_token_ids[1:]):
        found = output.prompt_logprobs[position + 1][token_id].logprob
        assert found == pytest.approx(float(logits[position, token_id]), abs=1e-4)


def check_native_pass(checkpoint: Path, rng: np.random.Generator, cut: dict[str, Any]) -> None:
    """Check the native pass in bfloat16: near torch's, and the same bits where prompts are `cut`."""
    asked, params = chat("see: ", picture(rng, 96, 64), " what is it"), SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for options in ({"kernels": "torch"}, {}, cut):
        with LLM(checkpoint, num_pages=100, num_threads=1, **{"page_size": 16} | options) as llm:
            (output,) = llm.chat(asked, params)
            found.append([next(iter(one.values())).logprob for one in output.prompt_logprobs[1:] if one])
    plain, native, in_parts = np.array(found)
    assert np.array_equal(native, in_parts)
    assert np.abs(plain - native).mean() < 0.1, "bfloat16 rounds"


def check_gpu(checkpoint: Path, wanted: list[AddRequest], **options: Any) -> None:
    """Check that an engine on what stands in for a GPU tells what one on a CPU tells, also from its caches."""
    config = EngineConfig(model=str(checkpoint), **SMALL, **options).resolve()
    told_by = []
    for platform in (None, FakePlatform()):
        engine = build_engine(config, platform=platform).engine
        try:
            first, again = run(engine, wanted), run(engine, wanted[:1])  # from the caches
            told_by.append([told(first[one.id]) for one in wanted] + [told(again[wanted[0].id])])
        finally:
            engine.close()
    assert_same(*told_by, is_exact=False)


def request_of(spec: VisionSpec, rng: np.random.Generator, name: int, sizes: Sequence[tuple[int, int]]) -> AddRequest:
    """Text and images in turns; a size is in tokens of the image, rows and columns."""
    ids: list[int] = rng.integers(0, 200, int(rng.integers(1, 6))).tolist()
    media = []
    for rows, columns in sizes:
        height, width = rows * spec.factor, columns * spec.factor
        pixels = rng.integers(0, 256, (1, height, width, 3), dtype=np.uint8).tobytes()
        digest = content_digest(pixels, height, width, "")
        patches = (rows * spec.merge, columns * spec.merge)
        span = MediaSpan(len(ids) + 1, rows * columns, digest, *patches, spec.image_token_id)
        media.append(MediaInput(span, pixels))
        ids += [spec.start_token_id, *[spec.image_token_id] * span.length, spec.end_token_id]
        ids += rng.integers(0, 200, int(rng.integers(1, 6))).tolist()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
    return AddRequest(id=str(name), prompt_token_ids=with_surrogates(ids, media), params=params, media=media)
