"""`VisionSpec`: what a checkpoint's files say of its vision tower, its placeholders and how its images are prepared.

Read by both sides: text workers prepare images by it, the engine builds the tower. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model_files import read_json
from tokenmill.vision.resize import SizeRule

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
# What the published checkpoints say; the defaults of transformers' class are those of an older model.
MIN_PIXELS, MAX_PIXELS = 65536, 16777216
MIN_VIDEO_PIXELS, MAX_VIDEO_PIXELS = 4096, 25165824


class _Tower(msgspec.Struct):
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    deepstack_visual_indexes: list[int]
    num_position_embeddings: int = 2304
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    hidden_act: str = "gelu_pytorch_tanh"
    rope_parameters: dict[str, Any] | None = None


class _Size(msgspec.Struct):
    shortest_edge: int = MIN_PIXELS
    longest_edge: int = MAX_PIXELS


class _Processor(msgspec.Struct):
    size: _Size = msgspec.field(default_factory=_Size)
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class _VideoSize(msgspec.Struct):
    shortest_edge: int = MIN_VIDEO_PIXELS
    longest_edge: int = MAX_VIDEO_PIXELS


class _VideoProcessor(msgspec.Struct):
    size: _VideoSize = msgspec.field(default_factory=_VideoSize)
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int = 768


class _Config(msgspec.Struct):
    architectures: list[str]
    vision_config: _Tower
    text_config: dict[str, Any]
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A tower and what surrounds it.

    Attributes:
        depth: blocks. hidden_size, intermediate_size, num_heads: of each of them. out_size: of the text model.
        deepstack: the blocks whose output also goes into the text model, behind its layers 0, 1, ...
        table_side: the learned positions are a square of so many.
        theta: base of the rotary embedding.
        merge: so many patches in each direction become one embedding. frames: an image is repeated so often.
        sections: frequencies of the text model's rotary embedding that turn by time, row and column.
        min_pixels, max_pixels: to which an image is resized.
        min_video_pixels, max_video_pixels: to which all frames of a video are, together.
        frame_tokens: embeddings of one frame at most; 0: only a video is bounded.
        mean, std: of each channel, on a scale of 0 to 1.
        image_token_id, video_token_id: their placeholders. start_token_id, end_token_id: what stands around them.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_size: int
    deepstack: tuple[int, ...]
    table_side: int
    theta: float
    patch_size: int
    merge: int
    frames: int
    sections: tuple[int, int, int]
    min_pixels: int
    max_pixels: int
    min_video_pixels: int
    max_video_pixels: int
    frame_tokens: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token_id: int
    video_token_id: int
    start_token_id: int
    end_token_id: int

    @property
    def factor(self) -> int:
        """Height and width of an image are multiples of it, in pixels."""
        return self.patch_size * self.merge

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Tokens that text must not spell."""
        return self.image_token_id, self.video_token_id, self.start_token_id, self.end_token_id

    def size_rule(self, num_frames: int = 0) -> SizeRule:
        """How images are resized; with `num_frames`, the frames of a video of so many."""
        if not num_frames:
            return SizeRule(self.factor, self.min_pixels, self.max_pixels)
        most = self.max_video_pixels
        if self.frame_tokens:
            own = min(self.frame_tokens * self.factor**2, most // num_frames)
            most = num_frames * max(own, int(1.05 * self.min_video_pixels))
        return SizeRule(self.factor, self.min_video_pixels, most, num_frames, self.frames)


def read_vision(folder: Path) -> VisionSpec | None:
    """The vision part of a checkpoint; None: its model takes text only.

    Raises:
        InvalidCheckpoint: it has one that is not supported; names the field.
    """
    fields = read_json(folder, "config.json")
    if fields.get("architectures") != [ARCHITECTURE]:
        return None
    try:
        config = msgspec.convert(fields, _Config)
        stored = read_json(folder, "preprocessor_config.json")
        if not stored:
            stored = read_json(folder, "processor_config.json").get("image_processor") or {}
        processor = msgspec.convert(stored, _Processor)
        stored = read_json(folder, "video_preprocessor_config.json")
        if not stored:
            stored = read_json(folder, "processor_config.json").get("video_processor") or {}
        video = msgspec.convert(stored, _VideoProcessor)
    except msgspec.ValidationError as error:
        raise InvalidCheckpoint(f"{folder}: {error}") from error
    return _spec(config, processor, video, folder)


def _spec(config: _Config, processor: _Processor, video: _VideoProcessor, folder: Path) -> VisionSpec:
    tower, rope = config.vision_config, config.text_config.get("rope_parameters")
    rope = rope or config.text_config.get("rope_scaling") or {}
    sections, layers = rope.get("mrope_section", [24, 20, 20]), config.text_config.get("num_hidden_layers", 0)
    side = isqrt(tower.num_position_embeddings)
    checks = {
        "vision_config.hidden_act": tower.hidden_act == "gelu_pytorch_tanh",
        "vision_config.in_channels": tower.in_channels == 3,
        "vision_config.num_position_embeddings": side > 0 and side * side == tower.num_position_embeddings,
        "vision_config.num_heads": tower.num_heads > 0 and tower.hidden_size % (4 * tower.num_heads) == 0,
        "vision_config.out_hidden_size": tower.out_hidden_size == config.text_config.get("hidden_size"),
        "vision_config.deepstack_visual_indexes": _is_deepstack(tower, layers),
        "mrope_section": isinstance(sections, list) and len(sections) == 3,
        "mrope_interleaved": rope.get("mrope_interleaved", True) is True,
        "patch sizes": min(tower.patch_size, tower.spatial_merge_size, tower.temporal_patch_size) > 0,
    }
    for field, is_right in checks.items():
        if not is_right:
            raise InvalidCheckpoint(f"{folder}/config.json: this value of {field} is not supported")
    theta = (tower.rope_parameters or {}).get("rope_theta", 10000.0)
    return VisionSpec(
        depth=tower.depth,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_heads,
        out_size=tower.out_hidden_size,
        deepstack=tuple(tower.deepstack_visual_indexes),
        table_side=side,
        theta=float(theta),
        patch_size=tower.patch_size,
        merge=tower.spatial_merge_size,
        frames=tower.temporal_patch_size,
        sections=(sections[0], sections[1], sections[2]),
        min_pixels=processor.size.shortest_edge,
        max_pixels=processor.size.longest_edge,
        min_video_pixels=video.size.shortest_edge,
        max_video_pixels=video.size.longest_edge,
        frame_tokens=video.max_video_tokens if video.cap_pixels_per_frame else 0,
        mean=processor.image_mean,
        std=processor.image_std,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        start_token_id=config.vision_start_token_id,
        end_token_id=config.vision_end_token_id,
    )


def _is_deepstack(tower: _Tower, num_layers: int) -> bool:
    """Rows are added behind a layer: the last one is followed by none."""
    indexes = tower.deepstack_visual_indexes
    return indexes == sorted(set(indexes)) and all(0 <= i < tower.depth for i in indexes) and len(indexes) < num_layers
