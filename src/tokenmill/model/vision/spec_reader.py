"""Read `VisionSpec` from a checkpoint's files: the configs of Qwen3-VL, Qwen2.5-VL, Gemma 3 and Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.vision.gemma_reader import read_gemma3, read_gemma4
from tokenmill.model.vision.processor_config import Processor, Unsupported, check
from tokenmill.model.vision.spec import VisionSpec

QWEN3, QWEN3_MOE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
QWEN25 = "Qwen2_5_VLForConditionalGeneration"
GEMMA3, GEMMA4 = "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"


class _Tower(msgspec.Struct, kw_only=True):
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    hidden_act: str
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    rope_parameters: dict[str, Any] | None = None


class _Qwen3Tower(_Tower, kw_only=True):
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    deepstack_visual_indexes: list[int]
    num_position_embeddings: int = 2304


class _Qwen25Tower(_Tower, kw_only=True):
    patch_size: int = 14
    hidden_act: str = "silu"
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    tokens_per_second: float = 4
    window_size: int = 112


class _Text(msgspec.Struct):
    """The text model's config; in older files of Qwen2.5-VL its fields stand in the file itself."""

    hidden_size: int
    num_hidden_layers: int
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None

    @property
    def rope(self) -> dict[str, Any]:
        return self.rope_parameters or self.rope_scaling or {}


class _Tokens(msgspec.Struct):
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653


def read_vision(folder: Path) -> VisionSpec | None:
    """Read the vision part of a checkpoint; None: its model takes text only.

    Raises:
        InvalidCheckpoint: it has one that is not supported; names the field.
    """
    fields = read_json(folder, "config.json")
    read = _READERS.get(str((fields.get("architectures") or [""])[0]))
    if read is None or fields.get("vision_config") is None:
        return None
    try:
        image = _processor(folder, "preprocessor_config.json", "image_processor")
        video = _processor(folder, "video_preprocessor_config.json", "video_processor")
        # As transformers does: older folders have one file for both.
        video = image if read is _read_qwen25 and video == Processor() else video
        return read(fields, image, video)
    except msgspec.ValidationError as error:
        raise InvalidCheckpoint(f"{folder}: {error}") from error
    except Unsupported as error:
        raise InvalidCheckpoint(f"{folder}/config.json: this value of {error} is not supported") from None


def _processor(folder: Path, file: str, part: str) -> Processor:
    stored = read_json(folder, file) or read_json(folder, "processor_config.json").get(part) or {}
    return msgspec.convert(stored, Processor)


def _read_qwen3(fields: Mapping[str, Any], image: Processor, video: Processor) -> VisionSpec:
    tower = msgspec.convert(fields.get("vision_config"), _Qwen3Tower)
    text = msgspec.convert(fields.get("text_config"), _Text)
    side, deepstack = isqrt(tower.num_position_embeddings), tower.deepstack_visual_indexes
    is_rising = deepstack == sorted(set(deepstack)) and all(0 <= index < tower.depth for index in deepstack)
    check(
        {
            "vision_config.hidden_act": tower.hidden_act == "gelu_pytorch_tanh",
            "vision_config.num_position_embeddings": side > 0 and side * side == tower.num_position_embeddings,
            # Rows are added behind a layer: the last one is followed by none.
            "vision_config.deepstack_visual_indexes": is_rising and len(deepstack) < text.num_hidden_layers,
            "mrope_interleaved": text.rope.get("mrope_interleaved", True) is True,
        }
    )
    least, most = image.pixels((65536, 16777216))
    video_least, video_most = video.pixels((4096, 25165824))
    return VisionSpec(
        **_common(fields, tower, text, [24, 20, 20]),
        deepstack=tuple(deepstack),
        table_side=side,
        min_pixels=least,
        max_pixels=most,
        min_video_pixels=video_least,
        max_video_pixels=video_most,
        frame_tokens=(video.max_video_tokens or 768) if video.cap_pixels_per_frame else 0,
        mean=image.image_mean or (0.5, 0.5, 0.5),
        std=image.image_std or (0.5, 0.5, 0.5),
    )


def _read_qwen25(fields: Mapping[str, Any], image: Processor, video: Processor) -> VisionSpec:
    tower = msgspec.convert(fields.get("vision_config"), _Qwen25Tower)
    text = msgspec.convert(fields.get("text_config", fields), _Text)
    full = tower.fullatt_block_indexes
    window = tower.window_size // max(1, tower.patch_size * tower.spatial_merge_size)
    check(
        {
            "vision_config.hidden_act": tower.hidden_act == "silu",
            "vision_config.fullatt_block_indexes": all(0 <= index < tower.depth for index in full),
            "vision_config.window_size": window > 0,
            "vision_config.tokens_per_second": tower.tokens_per_second > 0,
        }
    )
    least, most = image.pixels((3136, 12845056))
    video_least, video_most = video.pixels((100352, 602112))
    return VisionSpec(
        **_common(fields, tower, text, [16, 24, 24]),
        is_gated=True,
        window=window,
        full_blocks=full,
        is_interleaved=False,
        tokens_per_second=tower.tokens_per_second,
        min_pixels=least,
        max_pixels=most,
        min_video_pixels=video_least,
        max_video_pixels=video_most,
        video_tokens=(video.max_video_tokens or 128000) if video.cap_pixels_per_frame else 0,
        mean=image.image_mean or (0.48145466, 0.4578275, 0.40821073),
        std=image.image_std or (0.26862954, 0.26130258, 0.27577711),
    )


_READERS = MappingProxyType(
    {QWEN3: _read_qwen3, QWEN3_MOE: _read_qwen3, QWEN25: _read_qwen25, GEMMA3: read_gemma3, GEMMA4: read_gemma4}
)


def _common(fields: Mapping[str, Any], tower: _Tower, text: _Text, sections: list[int]) -> dict[str, Any]:
    """Return the fields that both models share, checked."""
    tokens = msgspec.convert(dict(fields), _Tokens)
    sections = text.rope.get("mrope_section", sections)
    check(
        {
            "vision_config.in_channels": tower.in_channels == 3,
            "vision_config.num_heads": tower.num_heads > 0 and tower.hidden_size % (4 * tower.num_heads) == 0,
            "vision_config.out_hidden_size": tower.out_hidden_size == text.hidden_size,
            "mrope_section": isinstance(sections, list) and len(sections) == 3,
            "patch sizes": min(tower.patch_size, tower.spatial_merge_size, tower.temporal_patch_size) > 0,
        }
    )
    return {
        "depth": tower.depth,
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_heads": tower.num_heads,
        "out_size": tower.out_hidden_size,
        "theta": float((tower.rope_parameters or {}).get("rope_theta", 10000.0)),
        "patch_size": tower.patch_size,
        "merge": tower.spatial_merge_size,
        "frames": tower.temporal_patch_size,
        "sections": tuple(sections),
        "image_token_id": tokens.image_token_id,
        "video_token_id": tokens.video_token_id,
        "start_token_id": tokens.vision_start_token_id,
        "end_token_id": tokens.vision_end_token_id,
    }
