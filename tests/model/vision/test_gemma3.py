"""Gemma 3 with images: averaged patches, and tokens of an image that see each other: transformers' tower and tokens."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.lab.conformance.faulty import Plain
from tests.model.kernels.gpu import DEVICE
from tests.model.vision.checks import Images, check_answers, check_gpu, check_logprobs, request_of
from tests.model.vision.test_llm import GREEDY, NUM_TOKENS, chat, encoder_of, picture, tokens
from tests.vision_checkpoints import (
    GEMMA_MARKS,
    GEMMA_SIDE,
    GEMMA_TOKENS,
    load_vision_oracle,
    make_gemma3_checkpoint,
)
from tokenmill import LLM
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest
from tokenmill.core.scheduling import Feature
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.architecture_config import read_architecture
from tokenmill.model.vision.decoding import decode_image
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.vision.tower import load_tower


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3_checkpoint(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    return load_vision_oracle(checkpoint)


def processed(images: Images) -> dict[str, torch.Tensor]:
    if not images:
        return {}
    size = {"height": GEMMA_SIDE, "width": GEMMA_SIDE}
    processor = Gemma3ImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return {"pixel_values": processor(images=list(images), return_tensors="pt")["pixel_values"]}


def answer_of(oracle: transformers.PreTrainedModel, prompt: list[int], images: Images) -> list[int]:
    ids = torch.tensor([prompt])
    answer = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        token_type_ids=(ids == oracle.config.image_token_id).int(),
        **processed(images),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


@torch.no_grad()
def test_the_tower_is_that_of_transformers(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    pixels = rng.integers(0, 256, (1, GEMMA_SIDE, GEMMA_SIDE, 3), dtype=np.uint8)
    spec = read_vision(checkpoint)
    assert spec is not None
    found = load_tower(checkpoint, spec, TorchKernels("float32", "cpu")).encode(torch.from_numpy(pixels))
    values = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    expected = oracle.model.get_image_features(values).pooler_output[0]
    assert found.shape == (GEMMA_TOKENS, 1, 32)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(60, 150), (300, 90), (GEMMA_SIDE, GEMMA_SIDE)])
def test_pixels_are_those_of_transformers(checkpoint: Path, shape: tuple[int, int], rng: np.random.Generator) -> None:
    image, file = picture(rng, *shape), BytesIO()
    image.save(file, "PNG")
    spec = read_vision(checkpoint)
    assert spec is not None
    head, pixels = decode_image(file.getvalue(), spec.size_rule())
    assert (head.height, head.width) == (GEMMA_SIDE, GEMMA_SIDE)
    found = np.frombuffer(pixels, np.uint8).reshape(GEMMA_SIDE, GEMMA_SIDE, 3).transpose(2, 0, 1) / 255
    expected = processed([image])["pixel_values"][0].numpy() * 0.5 + 0.5
    assert np.abs(found - expected).max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 10, "max_num_seqs": 4, "encoder_budget": 9},
        # Pages that end within images, of which a prefix of some is found again.
        {"max_num_batched_tokens": 12, "max_num_seqs": 4, "page_size": 4},
        {
            "num_pages": 24,
            "page_size": 4,
            "max_model_len": 80,
            "admission": "optimistic",
            "encoder_cache_tokens": 10,
            "encoder_budget": 10,
        },
        {"disable_hybrid_kv_cache_manager": True, "page_size": 4},
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"attention_backend": "reference"},
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
        logits = oracle(ids, token_type_ids=types, **processed([image])).logits[0].log_softmax(-1)
        causal = oracle(ids, **processed([image])).logits[0].log_softmax(-1)
        assert (logits - causal).abs().max() > 1e-2  # what is seen ahead counts
        return logits

    check_logprobs(checkpoint, image, logits_of)


def test_the_prompt_is_that_of_the_processor(checkpoint: Path, rng: np.random.Generator) -> None:
    with LLM(checkpoint, dtype="float32", num_pages=50) as llm:
        (output,) = llm.chat(chat("a", picture(rng, 50, 60), "b <start_of_image>"), GREEDY)
        tokenizer = llm.get_tokenizer()
    start, end, image = GEMMA_MARKS
    text = f"<|im_start|>user\na\n\n{start}{image * GEMMA_TOKENS}{end}\n\nb "
    assert output.prompt_token_ids[: len(tokenizer.encode(text))] == tokenizer.encode(text)
    assert tokenizer.decode(output.prompt_token_ids).count(start) == 2  # the second one is typed: plain text
    assert output.prompt_token_ids.count(tokenizer.encode(start)[0]) == 1


def test_an_image_is_found_again_up_to_a_page_within_it(checkpoint: Path, rng: np.random.Generator) -> None:
    image, other = picture(rng, 96, 96), picture(rng, 96, 96)
    with LLM(checkpoint, dtype="float32", num_pages=80, page_size=4, disable_hybrid_kv_cache_manager=True) as llm:
        encoder = encoder_of(llm)
        (before,) = llm.chat(chat(image, "a"), GREEDY)
        (again,) = llm.chat(chat(image, "a"), GREEDY)
        assert encoder.num_encoded == GEMMA_TOKENS
        first = before.prompt_token_ids.index(max(before.prompt_token_ids))  # of the image
        assert again.num_cached_tokens > first
        (different,) = llm.chat(chat(other, "a"), GREEDY)
        assert encoder.num_encoded == 2 * GEMMA_TOKENS
        assert different.num_cached_tokens <= first
    assert tokens(again) == tokens(before)


def test_an_image_larger_than_a_step_is_refused(checkpoint: Path, rng: np.random.Generator) -> None:
    small = {"max_num_batched_tokens": 8, "max_num_seqs": 2}
    refusal = pytest.raises(InvalidRequest, match=r"9 tokens is run in one step, and a step runs 8 \(--max-num")
    with LLM(checkpoint, dtype="float32", num_pages=50, **small) as llm, refusal:
        llm.chat(chat(picture(rng, 50, 60), "hello"), GREEDY)


def test_videos_are_refused(checkpoint: Path, rng: np.random.Generator) -> None:
    with LLM(checkpoint, dtype="float32", num_pages=50) as llm:
        parts = [{"type": "video", "video": [picture(rng, 56, 56)] * 2}]
        with pytest.raises(InvalidRequest, match="videos are not supported"):
            llm.chat([{"role": "user", "content": parts}], GREEDY)


def test_the_text_half_alone_has_the_features_of_text(checkpoint: Path) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(InvalidConfig, match="--language-model-only"):
        LLM(checkpoint, dtype="float32", num_pages=50, speculative_config=speculation)
    answers = []
    for options in ({}, {"language_model_only": True, "speculative_config": speculation}):
        with LLM(checkpoint, dtype="float32", num_pages=50, **options) as llm:
            answers.append([tokens(one) for one in llm.generate([[5, 3, 8, 200, 7]], GREEDY)])
            if options:
                with pytest.raises(InvalidRequest, match="image"):
                    llm.chat(chat(Image.new("RGB", (9, 9)), "hello"), GREEDY)
    assert answers[0] == answers[1]


class Cutting(Plain):
    """Runs as many tokens of a request as it likes, of images too."""

    serves = Plain.serves | {Feature.IMAGES}


def test_a_scheduler_that_may_cut_an_image_is_refused(checkpoint: Path) -> None:
    options = {"num_pages": 50, "dtype": "float32"}
    with pytest.raises(InvalidConfig, match="runs an image in one step"):
        LLM(checkpoint, scheduler_cls=f"{__name__}:Cutting", **options)
    refusal = pytest.raises(InvalidRequest, match="does not serve images")
    with LLM(checkpoint, scheduler_cls=f"{Plain.__module__}:Plain", **options) as llm, refusal:
        llm.chat(chat(Image.new("RGB", (9, 9)), "hello"), GREEDY)


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "hidden_act", "gelu"),
        ("config.json", "num_attention_heads", 5),
        ("config.json", "layer_norm_eps", 1e-5),
        ("config.json", "patch_size", 15),
        ("config.json", "mm_tokens_per_image", 16),
        ("config.json", "image_token_index", 400),
        ("preprocessor_config.json", "do_pan_and_scan", True),
        ("preprocessor_config.json", "resample", 0),
        ("preprocessor_config.json", "size", {"height": 56, "width": 84}),
    ],
)
def test_other_values_are_refused_by_name(
    checkpoint: Path, tmp_path: Path, file: str, field: str, value: object
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        fields = json.loads((checkpoint / name).read_text())
        if name == file:
            part = fields["vision_config"] if field in fields.get("vision_config", {}) else fields
            part[field] = value
        (tmp_path / name).write_text(json.dumps(fields))
    with pytest.raises(InvalidCheckpoint, match=field):
        read_vision(tmp_path)


def test_a_config_without_a_tower_is_one_of_text(checkpoint: Path, tmp_path: Path) -> None:
    fields = json.loads((checkpoint / "config.json").read_text())
    assert read_architecture(fields).spans_see_ahead
    del fields["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_vision(tmp_path) is None
    architecture = read_architecture(fields)
    assert not (architecture.takes_images or architecture.spans_see_ahead)


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
def test_an_engine_on_a_gpu_tells_what_one_on_a_cpu_tells(checkpoint: Path, rng: np.random.Generator) -> None:
    spec = read_vision(checkpoint)
    assert spec is not None
    size = (spec.side // spec.factor, spec.side // spec.factor)
    check_gpu(checkpoint, [request_of(spec, rng, number, count * [size]) for number, count in enumerate([1, 0, 2, 1])])
