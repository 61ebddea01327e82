"""Videos as lists of frames on a random Qwen3-VL: transformers' prompt, pixels, positions and tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as their_frame_resize

from tests.model.vision.test_llm import GREEDY, NUM_TOKENS, picture, processed, tokens
from tests.vision_checkpoints import MAX_VIDEO_PIXELS, MIN_PIXELS
from tokenmill import LLM
from tokenmill.core.errors import InvalidRequest
from tokenmill.llm.outputs import RequestOutput
from tokenmill.model.vision.spec_reader import read_vision

Frames = Sequence[Image.Image]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, dtype="float32", num_pages=200) as llm:
        yield llm


def clip(rng: np.random.Generator, count: int, height: int, width: int) -> Frames:
    return [picture(rng, height, width) for _ in range(count)]


def chat(*parts: str | Image.Image | Frames, fps: float = 2.0) -> list[dict[str, object]]:
    content: list[dict[str, object]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif isinstance(part, Image.Image):
            content.append({"type": "image", "image": part})
        else:
            content.append({"type": "video", "video": list(part), "fps": fps})
    return [{"role": "user", "content": content}]


def patches(frames: Frames) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches that their video processor, which needs torchvision, makes of frames; and the grid."""
    size = frames[0].height, frames[0].width
    height, width = their_frame_resize(len(frames), *size, 2, 32, MIN_PIXELS, MAX_VIDEO_PIXELS)
    resized = [np.asarray(one.resize((width, height), Image.Resampling.BICUBIC)) for one in frames]
    resized += resized[-1:] * (len(frames) % 2)
    values = (torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    grid = len(resized) // 2, height // 16, width // 16
    groups = values.view(1, grid[0], 2, 3, grid[1] // 2, 2, 16, grid[2] // 2, 2, 16)
    flat = groups.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(grid[0] * grid[1] * grid[2], -1)
    return flat, torch.tensor([grid])


def answer_of(
    oracle: transformers.PreTrainedModel, prompt: list[int], videos: Sequence[Frames], images: Frames = ()
) -> list[int]:
    ids = torch.tensor([prompt])
    types = (ids == oracle.config.image_token_id).int() + 2 * (ids == oracle.config.video_token_id).int()
    pixels, grids = zip(*map(patches, videos), strict=True)
    answer = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pixel_values_videos=torch.cat(pixels),
        video_grid_thw=torch.cat(grids),
        mm_token_type_ids=types,
        **processed(images),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


def spelled(llm: LLM, output: RequestOutput) -> str:
    return str(llm.get_tokenizer().decode(output.prompt_token_ids))


def test_answers_are_those_of_transformers(
    llm: LLM, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    even, odd, image = clip(rng, 4, 64, 96), clip(rng, 5, 100, 40), picture(rng, 40, 90)
    chats = [chat(even, "hello"), chat("see: ", odd, "and", image), chat(image, odd, fps=0.7)]
    shown: list[tuple[Frames, Frames]] = [(even, []), (odd, [image]), (odd, [image])]
    for output, (video, images) in zip(llm.chat(chats, GREEDY), shown, strict=True):
        assert tokens(output) == answer_of(oracle, output.prompt_token_ids, [video], images)


@pytest.mark.parametrize(("count", "fps"), [(2, 2.0), (5, 2.0), (6, 23.976), (3, 0.3)])
def test_prompts_are_those_of_transformers(
    llm: LLM, checkpoint: Path, rng: np.random.Generator, count: int, fps: float
) -> None:
    frames = clip(rng, count, 64, 64)
    (output,) = llm.chat(chat("see:", frames, "well", fps=fps), GREEDY)
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), fps, 2)
    _, grid = patches(frames)
    pads = "<|video_pad|>" * int(grid[0, 1] * grid[0, 2] // 4)
    video = "".join(f"<{at:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for at in times)
    prompt = f"<|im_start|>user\nsee:{video}well<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert output.prompt_token_ids == tokenizer.encode(prompt, add_special_tokens=False)


def test_frames_are_cached_like_images(llm: LLM, rng: np.random.Generator) -> None:
    frames, scheduler = clip(rng, 6, 64, 64), llm._local.engine.scheduler
    (before,) = llm.chat(chat(frames, "a question"), GREEDY)
    encoded = scheduler.counts()["encoder_tokens"]
    (again,) = llm.chat(chat(frames, "a question"), GREEDY)
    assert scheduler.counts()["encoder_tokens"] == encoded
    assert tokens(again) == tokens(before)
    (longer,) = llm.chat(chat([*frames, *clip(rng, 2, 64, 64)], "a question"), GREEDY)
    assert 0 < scheduler.counts()["encoder_tokens"] - encoded < encoded  # the new pair alone
    assert longer.num_cached_tokens >= 16


def test_however_prompts_are_cut(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    videos = [clip(rng, 4, 64, 64), clip(rng, 7, 64, 64)]
    options = {"dtype": "float32", "num_pages": 60, "page_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 2}
    with LLM(checkpoint, **options, encoder_budget=6, encoder_cache_tokens=8) as llm:
        outputs = llm.chat([chat(video, "hello") for video in videos], GREEDY)
    for output, video in zip(outputs, videos, strict=True):
        assert tokens(output) == answer_of(oracle, output.prompt_token_ids, [video])


def test_frames_in_one_url_as_clients_of_vllm_send_them(llm: LLM, rng: np.random.Generator) -> None:
    files = []
    for frame in clip(rng, 4, 64, 64):
        buffer = io.BytesIO()
        frame.save(buffer, "JPEG")
        files.append(base64.b64encode(buffer.getvalue()).decode())
    parts = [
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(files)}},
        {"type": "video", "video": [f"data:image/jpeg;base64,{file}" for file in files]},
    ]
    first, second = llm.chat([[{"role": "user", "content": [part]}] for part in parts], GREEDY)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert "<0.2 seconds>" in spelled(llm, first)
    assert tokens(first) == tokens(second)


def test_what_is_no_video_is_refused(llm: LLM, checkpoint: Path, rng: np.random.Generator) -> None:
    with pytest.raises(InvalidRequest, match="2 videos; at most 1"):
        llm.chat(chat(clip(rng, 2, 32, 32), clip(rng, 2, 32, 32)), GREEDY)
    with pytest.raises(InvalidRequest, match="one size"):
        llm.chat(chat([picture(rng, 64, 64), picture(rng, 32, 96)]), GREEDY)
    (output,) = llm.chat(chat("<|vision_start|><|video_pad|><|vision_end|>", clip(rng, 2, 32, 32)), GREEDY)
    spec = read_vision(checkpoint)
    assert spec is not None
    assert output.prompt_token_ids.count(spec.video_token_id) == 1  # what is typed is text


def test_frames_of_a_video_share_a_cap_where_the_processor_says_so(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "video_preprocessor_config.json").unlink()
    text = '{"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "cap_pixels_per_frame": true}'
    (tmp_path / "video_preprocessor_config.json").write_text(text)
    spec = read_vision(tmp_path)
    assert spec is not None
    assert spec.size_rule(4).max_pixels == 4 * 768 * 32 * 32
    assert spec.size_rule(100).max_pixels == 100 * (25165824 // 100)
    assert spec.size_rule(0).max_pixels != spec.size_rule(4).max_pixels
