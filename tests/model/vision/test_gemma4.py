"""Gemma 4 with images: axial blocks, averages, per-layer embeddings of padding: transformers' tower and tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from tests.model.kernels.gpu import DEVICE
from tests.model.vision.checks import check_answers, check_gpu, check_logprobs, check_native_pass, request_of
from tests.model.vision.test_llm import GREEDY, NUM_TOKENS, chat, picture
from tests.vision_checkpoints import GEMMA4_TOKENS, GEMMA_MARKS, load_vision_oracle, make_gemma4_checkpoint
from tokenmill import LLM
from tokenmill.core.errors import InvalidCheckpoint, InvalidRequest
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.vision.decoding import decode_image
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.vision.tower import load_tower

Images = Sequence[Image.Image]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma4_checkpoint(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    return load_vision_oracle(checkpoint)


def processed(images: Images) -> dict[str, torch.Tensor]:
    if not images:
        return {}
    found = Gemma4ImageProcessorPil(max_soft_tokens=GEMMA4_TOKENS)(images=list(images), return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "image_position_ids")}


def answer_of(oracle: transformers.PreTrainedModel, prompt: list[int], images: Images) -> list[int]:
    ids = torch.tensor([prompt])
    answer = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == oracle.config.image_token_id).int(),
        **processed(images),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


@torch.no_grad()
@pytest.mark.parametrize("grid", [(1, 1), (2, 5), (8, 8), (1, 30)])
def test_the_tower_is_that_of_transformers(
    checkpoint: Path, oracle: transformers.PreTrainedModel, grid: tuple[int, int], rng: np.random.Generator
) -> None:
    rows, columns = grid
    pixels = rng.integers(0, 256, (48 * rows, 48 * columns, 3), dtype=np.uint8)
    spec = read_vision(checkpoint)
    assert spec is not None
    found = load_tower(checkpoint, spec, TorchKernels("float32", "cpu")).encode(torch.from_numpy(pixels))
    values = torch.from_numpy(pixels).float().div(255).view(3 * rows, 16, 3 * columns, 16, 3)
    patches = values.permute(0, 2, 1, 3, 4).reshape(1, 9 * rows * columns, -1)
    y, x = torch.meshgrid(torch.arange(3 * rows), torch.arange(3 * columns), indexing="ij")
    places = torch.stack([x, y], -1).view(1, -1, 2)
    (expected,) = oracle.model.get_image_features(patches, places).pooler_output
    assert found.shape == (rows * columns, 1, 32)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_sizes_and_pixels_are_those_of_transformers(checkpoint: Path, rng: np.random.Generator) -> None:
    spec = read_vision(checkpoint)
    assert spec is not None
    rule = spec.size_rule()
    for height, width in [(1, 3000), (5000, 1), *rng.integers(1, 3000, (300, 2)).tolist()]:
        expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * GEMMA4_TOKENS, 3)
        assert rule.size_of(height, width) == expected
    image, file = picture(rng, 90, 200), BytesIO()
    image.save(file, "PNG")
    head, pixels = decode_image(file.getvalue(), rule)
    found = np.frombuffer(pixels, np.uint8).reshape(head.height // 16, 16, head.width // 16, 16, 3) / 255
    patches = found.transpose(0, 2, 1, 3, 4).reshape(-1, 768)
    assert np.abs(patches - processed([image])["pixel_values"][0, : len(patches)].numpy()).max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 11, "max_num_seqs": 4, "encoder_budget": 70, "page_size": 4},
        {"num_pages": 60, "page_size": 4, "max_model_len": 200, "admission": "optimistic", "encoder_cache_tokens": 80},
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
        return oracle(ids, mm_token_type_ids=types, **processed([image])).logits[0].log_softmax(-1)

    check_logprobs(checkpoint, image, logits_of)


def test_the_prompt_is_that_of_the_processor(checkpoint: Path, rng: np.random.Generator) -> None:
    image = picture(rng, 60, 150)
    with LLM(checkpoint, dtype="float32", num_pages=50) as llm:
        (output,) = llm.chat(chat("a", image, "b <image_soft_token>"), GREEDY)
        tokenizer = llm.get_tokenizer()
    start, end, pad = GEMMA_MARKS
    height, width = get_aspect_ratio_preserving_size(60, 150, 16, 9 * GEMMA4_TOKENS, 3)
    text = f"<|im_start|>user\na{start}{pad * (height * width // 48**2)}{end}b "
    assert output.prompt_token_ids[: len(tokenizer.encode(text))] == tokenizer.encode(text)
    assert tokenizer.decode(output.prompt_token_ids).endswith(f"b {pad}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
def test_the_native_pass_is_close_to_torch_however_prompts_are_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_gemma4_checkpoint(tmp_path, dtype=torch.bfloat16)
    check_native_pass(folder, rng, {"max_num_batched_tokens": 13, "max_num_seqs": 2})


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
def test_an_engine_on_a_gpu_tells_what_one_on_a_cpu_tells(checkpoint: Path, rng: np.random.Generator) -> None:
    spec = read_vision(checkpoint)
    assert spec is not None
    check_gpu(checkpoint, [request_of(spec, rng, number, count * [(3, 3)]) for number, count in enumerate([1, 0, 2])])


def test_videos_are_refused(checkpoint: Path, rng: np.random.Generator) -> None:
    with LLM(checkpoint, dtype="float32", num_pages=50) as llm:
        parts = [{"type": "video", "video": [picture(rng, 56, 56)] * 2}]
        with pytest.raises(InvalidRequest, match="videos are not supported"):
            llm.chat([{"role": "user", "content": parts}], GREEDY)


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "hidden_activation", "gelu"),
        ("config.json", "num_key_value_heads", 3),
        ("config.json", "attention_bias", True),
        ("config.json", "position_embedding_size", 209),
        ("config.json", "image_token_id", 400),
        ("processor_config.json", "do_normalize", True),
        ("processor_config.json", "resample", 2),
        ("processor_config.json", "pooling_kernel_size", 2),
    ],
)
def test_other_values_are_refused_by_name(
    checkpoint: Path, tmp_path: Path, file: str, field: str, value: object
) -> None:
    for name in ("config.json", "processor_config.json"):
        fields = json.loads((checkpoint / name).read_text())
        if name == file:
            part = next(one for one in (fields.get("vision_config"), fields.get("image_processor"), fields) if one)
            (part if field in part else fields)[field] = value
        (tmp_path / name).write_text(json.dumps(fields))
    with pytest.raises(InvalidCheckpoint, match=field):
        read_vision(tmp_path)
