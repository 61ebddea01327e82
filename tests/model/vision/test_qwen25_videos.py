"""Videos of Qwen2.5-VL: frames without text between them, at their times; against transformers and the makers' rule.

Since 5.3 transformers lets text go on behind a video's longer side, not behind its last time: it is told the positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.model.vision.test_llm import GREEDY, NUM_TOKENS, picture, tokens
from tests.model.vision.test_qwen25 import processed
from tests.model.vision.test_videos import chat, clip, spelled
from tests.vision_checkpoints import load_vision_oracle, make_qwen25_checkpoint
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import MediaSpan, surrogate_ids
from tokenmill.model.attention.media_turns import prompt_positions
from tokenmill.model.vision.resize import SizeRule
from tokenmill.model.vision.spec_reader import read_vision

Frames = Sequence[Image.Image]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TOKENS_PER_SECOND = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen25_checkpoint(tmp_path_factory.mktemp("qwen2.5-vl"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    return load_vision_oracle(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, dtype="float32", num_pages=200) as llm:
        yield llm


def patches(frames: Frames, rule: SizeRule) -> tuple[torch.Tensor, torch.Tensor]:
    """The patches that their video processor, which needs torchvision, makes of frames; and the grid."""
    height, width = rule.size_of(frames[0].height, frames[0].width)
    resized = [np.asarray(one.resize((width, height), Image.Resampling.BICUBIC)) for one in frames]
    resized += resized[-1:] * (len(frames) % 2)
    values = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).float() / 255
    values = (values - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    grid = len(resized) // 2, height // 14, width // 14
    groups = values.view(1, grid[0], 2, 3, grid[1] // 2, 2, 14, grid[2] // 2, 2, 14)
    flat = groups.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(grid[0] * grid[1] * grid[2], -1)
    return flat, torch.tensor([grid])


def positions_of(
    ids: list[int], config: transformers.PretrainedConfig, grids: list[list[int]], step: float
) -> torch.Tensor:
    """The makers' rule, token by token, [3, n]: text goes on behind the largest position so far."""
    places: list[list[int]] = []
    grids, at = list(grids), 0
    while at < len(ids):
        start = max((max(place) for place in places), default=-1) + 1
        if ids[at] not in (config.image_token_id, config.video_token_id):
            places.append([start] * 3)
            at += 1
            continue
        time, rows, columns = grids.pop(0)
        step_now = step if ids[at] == config.video_token_id else 0
        for frame in range(time):
            moment = int(np.float32(frame) * np.float32(step_now))
            for row in range(rows // 2):
                places += [[start + moment, start + row, start + column] for column in range(columns // 2)]
        at += time * rows * columns // 4
    return torch.tensor(places).T


def logits_of(
    oracle: transformers.PreTrainedModel,
    checkpoint: Path,
    ids: list[int],
    shown: list[Image.Image | Frames],
    fps: float,
) -> torch.Tensor:
    """transformers' logits of a prompt with images and videos, [n, vocab], at the positions of the makers' rule."""
    spec = read_vision(checkpoint)
    assert spec is not None
    images = [one for one in shown if isinstance(one, Image.Image)]
    videos = [patches(one, spec.size_rule(len(one))) for one in shown if not isinstance(one, Image.Image)]
    inputs = processed(images) if images else {}
    grids = iter(inputs.get("image_grid_thw", torch.zeros(0, 3)).tolist()), iter([one[1][0].tolist() for one in videos])
    order = [next(grids[not isinstance(one, Image.Image)]) for one in shown]
    positions = positions_of(ids, oracle.config, order, TOKENS_PER_SECOND * 2 / fps)
    with torch.inference_mode():
        return oracle(
            torch.tensor([ids]),
            position_ids=positions.unsqueeze(1),
            pixel_values_videos=torch.cat([one[0] for one in videos]),
            video_grid_thw=torch.cat([one[1] for one in videos]),
            **inputs,
        ).logits[0]


@pytest.mark.parametrize("fps", [2.0, 24.0, 0.7])
def test_answers_are_those_of_transformers(
    llm: LLM, checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator, fps: float
) -> None:
    even, odd, image = clip(rng, 4, 60, 90), clip(rng, 5, 100, 40), picture(rng, 40, 90)
    chats = [chat(even, "hello", fps=fps), chat("see: ", odd, "and", image, fps=fps), chat(image, odd, fps=fps)]
    shown: list[list[Image.Image | Frames]] = [[even], [odd, image], [image, odd]]
    for output, media in zip(llm.chat(chats, GREEDY), shown, strict=True):
        answer = tokens(output)
        logits = logits_of(oracle, checkpoint, output.prompt_token_ids + answer, media, fps)
        assert logits[-NUM_TOKENS - 1 : -1].argmax(-1).tolist() == answer


def test_however_prompts_are_cut(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    videos = [clip(rng, 4, 60, 60), clip(rng, 7, 56, 84)]
    options = {"dtype": "float32", "num_pages": 100, "page_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 2}
    with LLM(checkpoint, **options, encoder_budget=8, encoder_cache_tokens=12) as llm:
        outputs = llm.chat([chat(video, "hello", fps=0.5) for video in videos], GREEDY)
    for output, video in zip(outputs, videos, strict=True):
        answer = tokens(output)
        logits = logits_of(oracle, checkpoint, output.prompt_token_ids + answer, [video], 0.5)
        assert logits[-NUM_TOKENS - 1 : -1].argmax(-1).tolist() == answer


def test_positions_are_those_of_transformers_while_a_video_is_wider_than_long(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    spec = read_vision(checkpoint)
    assert spec is not None
    assert spec.tokens_per_second == TOKENS_PER_SECOND
    for _ in range(30):
        rows, columns = (2 * rng.integers(1, 8, 2)).tolist()
        side, frames = max(rows, columns) // 2, int(rng.integers(1, 6))
        step = float(rng.random()) * (side - 1) / max(1, frames - 1)
        ids, spans = rng.integers(0, 200, int(rng.integers(1, 9))).tolist(), []
        length = rows * columns // 4
        seconds = torch.tensor([step / TOKENS_PER_SECOND])
        for frame in range(frames):
            time = int(np.float32(frame) * np.float32(TOKENS_PER_SECOND * seconds[0].item()))
            span = MediaSpan(len(ids), length, "", rows, columns, spec.video_token_id, time, frame * length)
            spans.append(span)
            ids += [spec.video_token_id] * length
        ids += rng.integers(0, 200, int(rng.integers(1, 5))).tolist()
        types = 2 * (torch.tensor([ids]) == spec.video_token_id).int()
        expected, delta = oracle.model.get_rope_index(
            torch.tensor([ids]),
            mm_token_type_ids=types,
            video_grid_thw=torch.tensor([[frames, rows, columns]]),
            second_per_grid_ts=seconds,
        )
        found, shift = prompt_positions(len(ids), spans, spec.merge)
        assert found.tolist() == expected[:, 0].tolist()
        assert shift == int(delta)


def test_the_prompt_is_that_of_the_processor(llm: LLM, checkpoint: Path, rng: np.random.Generator) -> None:
    frames, spec = clip(rng, 5, 60, 90), read_vision(checkpoint)
    assert spec is not None
    (output,) = llm.chat(chat("see:", frames, "well"), GREEDY)
    _, grid = patches(frames, spec.size_rule(5))
    pads = "<|video_pad|>" * int(grid.prod() // 4)
    prompt = f"<|im_start|>user\nsee:<|vision_start|>{pads}<|vision_end|>well<|im_end|>\n<|im_start|>assistant\n"
    assert spelled(llm, output) == prompt


def test_the_same_frames_at_other_times_are_other_tokens(llm: LLM, rng: np.random.Generator) -> None:
    frames, scheduler = clip(rng, 6, 60, 60), llm._local.engine.scheduler
    (slow,) = llm.chat(chat(frames, "a question", fps=0.5), GREEDY)
    encoded = scheduler.counts()["encoder_tokens"]
    (fast, again) = llm.chat([chat(frames, "a question", fps=8.0), chat(frames, "a question", fps=0.5)], GREEDY)
    assert scheduler.counts()["encoder_tokens"] == encoded  # their embeddings are the same
    assert fast.num_cached_tokens < again.num_cached_tokens
    assert tokens(again) == tokens(slow)
    assert (surrogate_ids("a", 8) != surrogate_ids("a", 8, 4, 9)).any()


def test_a_video_longer_than_the_model_has_positions_for_is_refused(llm: LLM, rng: np.random.Generator) -> None:
    frames = clip(rng, 4, 28, 28)
    with pytest.raises(InvalidRequest, match=r"need 8\d\d positions, and the model has 512"):
        llm.chat(chat(frames, "hello", fps=0.01), GREEDY)
    slow = chat(frames, "hello", fps=0.02)  # two pairs, 400 positions apart
    (output,) = llm.chat(slow, GREEDY)
    assert len(tokens(output)) == NUM_TOKENS
    with pytest.raises(InvalidRequest, match="ask for fewer max_tokens"):
        llm.chat(slow, SamplingParams(max_tokens=100, temperature=0))


def test_frames_are_bounded_as_the_processor_says(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    spec = read_vision(tmp_path)  # one file for images and videos, as in published folders
    assert spec is not None
    assert spec.size_rule(10) == spec.size_rule()
    size = {"shortest_edge": 784, "longest_edge": 602112}
    fields = {"size": size, "cap_pixels_per_frame": True, "max_video_tokens": 100}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(fields))
    spec = read_vision(tmp_path)
    assert spec is not None
    total = int(100 * 28 * 28 * 0.9)
    assert spec.size_rule(2).max_pixels == total
    assert spec.size_rule(7).max_pixels == total * 2 // 7
    assert spec.size_rule(700).max_pixels == int(784 * 1.05)
