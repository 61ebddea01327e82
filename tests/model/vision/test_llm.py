"""`LLM.chat` with images on a random Qwen3-VL: transformers' tokens, however the prompt is cut, shared or preempted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.vision_checkpoints import MAX_PIXELS, MIN_PIXELS
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.engine.scheduler.resources.encoder_cache import EncoderCache
from tokenmill.lab.simulate.replay import replay
from tokenmill.llm.outputs import RequestOutput

NUM_TOKENS = 6
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
Images = Sequence[Image.Image]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, dtype="float32", num_pages=200) as llm:
        yield llm


def picture(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def chat(*parts: str | Image.Image) -> list[dict[str, object]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def processed(images: Images) -> dict[str, torch.Tensor]:
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    processor = Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return dict(processor(images=list(images), return_tensors="pt")) if images else {}


def answer_of(oracle: transformers.PreTrainedModel, prompt: list[int], images: Images) -> list[int]:
    ids = torch.tensor([prompt])
    types = (ids == oracle.config.image_token_id).int()
    more = {"mm_token_type_ids": types} if images else {}
    answer = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **processed(images),
        **more,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_answers_are_those_of_transformers(
    llm: LLM, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    first, second = picture(rng, 70, 120), picture(rng, 40, 90)
    chats = [chat(first, "hello"), chat("two: ", first, " and ", second, "?"), chat("no image")]
    shown = [[first], [first, second], []]
    for output, images in zip(llm.chat(chats, GREEDY), shown, strict=True):
        assert tokens(output) == answer_of(oracle, output.prompt_token_ids, images)


@torch.no_grad()
def test_logprobs_are_those_of_transformers(
    llm: LLM, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    image = picture(rng, 64, 96)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
    (output,) = llm.chat(chat(image, "what is it"), params)
    ids = torch.tensor([output.prompt_token_ids + tokens(output)])
    types = (ids == oracle.config.image_token_id).int()
    logits = oracle(ids, mm_token_type_ids=types, **processed([image])).logits[0, -NUM_TOKENS - 1 : -1]
    expected = logits.log_softmax(-1)
    for step, token_id in enumerate(tokens(output)):
        found = output.outputs[0].logprobs[step][token_id].logprob
        assert found == pytest.approx(float(expected[step, token_id]), abs=1e-4)


def encoder_of(llm: LLM) -> EncoderCache:
    encoder = llm._local.engine.scheduler.resource(EncoderCache)
    assert encoder is not None
    return encoder


def test_the_same_image_again_is_not_encoded_and_another_of_its_size_is_no_hit(
    llm: LLM, rng: np.random.Generator
) -> None:
    image, other = picture(rng, 96, 96), picture(rng, 96, 96)
    encoder = encoder_of(llm)
    (before,) = llm.chat(chat(image, "a question"), GREEDY)
    encoded = encoder.num_encoded
    (again,) = llm.chat(chat(image, "a question"), GREEDY)
    assert encoder.num_encoded == encoded
    assert again.num_cached_tokens > 8
    assert tokens(again) == tokens(before)
    (different,) = llm.chat(chat(other, "a question"), GREEDY)
    assert encoder.num_encoded == encoded + 9
    assert different.num_cached_tokens < 16


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 4, "encoder_budget": 9},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4, "disable_chunked_mm_input": True, "page_size": 4},
        # Too few pages for all at once, and room for the outputs of one image: preempted, evicted, encoded again.
        {
            "num_pages": 14,
            "page_size": 4,
            "max_model_len": 56,
            "admission": "optimistic",
            "encoder_cache_tokens": 10,
            "encoder_budget": 10,
        },
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"attention_backend": "reference"},
    ],
)
def test_answers_do_not_depend_on_how_prompts_are_cut_or_kept(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator, options: dict[str, object]
) -> None:
    images = [picture(rng, 96, 96), picture(rng, 64, 64), picture(rng, 32, 128)]
    shown = [[one] for one in images] + [[images[1], images[0]]]
    with LLM(checkpoint, **{"dtype": "float32", "num_pages": 100} | options) as llm:
        outputs = llm.chat([chat(*those, "hello") for those in shown], GREEDY)
    for output, those in zip(outputs, shown, strict=True):
        assert tokens(output) == answer_of(oracle, output.prompt_token_ids, those)


def test_images_may_begin_and_end_anywhere_in_a_page(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    images, words = [picture(rng, 64, 64), picture(rng, 96, 96)], ["a" * count for count in range(1, 5)]
    chats = [chat(word, *images, "hello") for word in words]
    with LLM(checkpoint, dtype="float32", num_pages=200, page_size=4) as llm:
        first = llm.chat(chats, GREEDY)
        again = llm.chat(chats, GREEDY)
    for offset in (0, 4):  # where one begins, and where it ends, 4 placeholders further on
        starts = {one.prompt_token_ids.index(oracle.config.image_token_id) + offset for one in first}
        assert {start % 4 for start in starts} == {0, 1, 2, 3}
    for one, cached in zip(first, again, strict=True):
        assert tokens(one) == tokens(cached) == answer_of(oracle, one.prompt_token_ids, images)
        assert cached.num_cached_tokens > len(cached.prompt_token_ids) - 8


def test_a_large_image_is_cached_but_for_the_end_of_its_prompt(
    checkpoint: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink()
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": 512 * 512}
    fields = {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    asked = chat(picture(rng, 512, 512), "what is there to be seen?")
    with LLM(tmp_path, dtype="float32", num_pages=50) as llm:
        encoder = encoder_of(llm)
        (before,) = llm.chat(asked, GREEDY)
        assert encoder.num_encoded == 256
        (again,) = llm.chat(asked, GREEDY)
        assert encoder.num_encoded == 256
    assert tokens(again) == tokens(before)
    assert again.num_cached_tokens >= 0.95 * len(again.prompt_token_ids)


def test_typed_placeholders_are_plain_text(llm: LLM, oracle: transformers.PreTrainedModel) -> None:
    (output,) = llm.chat(chat("<|vision_start|><|image_pad|> hello"), GREEDY)
    assert not {oracle.config.image_token_id, oracle.config.vision_start_token_id} & set(output.prompt_token_ids)
    assert "<|image_pad|>" in llm.get_tokenizer().decode(output.prompt_token_ids)


def test_an_image_is_also_a_path_or_a_data_url(llm: LLM, rng: np.random.Generator, tmp_path: Path) -> None:
    image = picture(rng, 50, 60)
    image.save(tmp_path / "image.png")
    (expected,) = llm.chat(chat(image, "hello"), GREEDY)
    parts = [{"type": "image", "image": str(tmp_path / "image.png")}, {"type": "text", "text": "hello"}]
    (found,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert tokens(found) == tokens(expected)
    assert found.prompt_token_ids == expected.prompt_token_ids


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, "not base64"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
        ({"type": "video_url", "video_url": {}}, "video_url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "a list of frames"),
        ({"type": "video", "video": "mill.mp4"}, "a list of the URLs of its frames"),
        ({"type": "video", "video": []}, "a video of 0 frames; 2 to 768 are taken"),
        ({"type": "video", "video": ["data:,"] * 769}, "a video of 769 frames"),
        ({"type": "video"}, "a video part is"),
        ({"type": "video", "video": ["data:image/png;base64,", "data:image/png;base64,"], "fps": 0}, "fps"),
        ({"type": "video", "video": ["data:image/png;base64,!", "data:image/png;base64,"]}, "not base64"),
    ],
)
def test_what_is_no_image_is_refused_by_name(llm: LLM, part: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        llm.chat([{"role": "user", "content": [part]}], GREEDY)


def test_more_images_than_a_request_may_have_are_refused(llm: LLM, rng: np.random.Generator) -> None:
    with pytest.raises(InvalidRequest, match="9 images; at most 8"):
        llm.chat(chat(*[picture(rng, 32, 32)] * 9), GREEDY)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"speculative_config": "ngram"}, "--speculative-config"),
        ({"quantization": "fp8"}, "--quantization fp8"),
        ({"encoder_budget": 0}, "--encoder-budget"),
        ({"limit_mm_per_prompt": {"audio": -1}}, "--limit-mm-per-prompt"),
    ],
)
def test_what_such_models_do_not_have_yet_is_refused_at_start(
    checkpoint: Path, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        LLM(checkpoint, **{"dtype": "float32", "num_pages": 50} | options)


def test_text_alone_has_the_bits_of_the_plain_text_model(
    llm: LLM, oracle: transformers.PreTrainedModel, checkpoint: Path, tmp_path: Path
) -> None:
    text = oracle.config.get_text_config()
    fields = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "rope_parameters")}
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    plain = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields, rope_parameters=rope)).eval()
    plain.model.load_state_dict(oracle.model.language_model.state_dict())
    plain.lm_head.load_state_dict(oracle.lm_head.state_dict())
    plain.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=3)
    prompt = [5, 3, 8, 200, 7]
    with LLM(tmp_path, dtype="float32", num_pages=50, attention_backend="cpu") as other:
        (expected,) = other.generate([prompt], params)
    (found,) = llm.generate([prompt], params)
    assert tokens(found) == tokens(expected)
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs


def test_kv_of_images_is_found_on_disk_again(checkpoint: Path, rng: np.random.Generator, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    image, other = picture(rng, 96, 96), picture(rng, 96, 96)
    options = {"dtype": "float32", "num_pages": 50, "page_size": 4, "kv_disk": str(tmp_path), "kv_disk_size": 1 << 24}
    with LLM(checkpoint, **options) as llm:
        (expected,) = llm.chat(chat(image, "a question"), GREEDY)
    with LLM(checkpoint, **options) as llm:
        (found, different) = llm.chat([chat(image, "a question"), chat(other, "a question")], GREEDY)
        assert llm._local.engine.scheduler.counts()["encoder_tokens"] == 9  # the other one's
    assert tokens(found) == tokens(expected)
    assert found.num_cached_tokens > 12
    assert different.num_cached_tokens <= 8


def test_a_log_with_images_is_replayed_without_the_model(
    checkpoint: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Small steps, few pages and a small cache: chunks end before images, requests are preempted, outputs evicted."""
    images = [picture(rng, 96, 96) for _ in range(3)]
    options = {"num_pages": 24, "page_size": 4, "max_num_seqs": 3, "encoder_cache_tokens": 16, "max_model_len": 64}
    log = tmp_path / "log"
    with LLM(checkpoint, dtype="float32", max_num_batched_tokens=16, step_log=str(log), **options) as llm:
        llm.chat([chat(images[number % 3], f"{number} so", images[number % 2]) for number in range(6)], GREEDY)
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_plans > 10
