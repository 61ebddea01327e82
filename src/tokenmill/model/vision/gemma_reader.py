"""Read `VisionSpec` of Gemma 3 and of Gemma 4. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.vision.processor_config import Processor, Size, check
from tokenmill.model.vision.spec import AxialBlocks, VisionSpec

# Pillow's numbers of how pixels are resampled, as processors have them.
_FILTERS = MappingProxyType({2: "BILINEAR", 3: "BICUBIC"})


class _SiglipTower(msgspec.Struct, kw_only=True):
    """The tower of Gemma 3. Its defaults are transformers'."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6


class _Gemma3Text(msgspec.Struct, kw_only=True):
    hidden_size: int = 2304
    vocab_size: int = 262208


class _Gemma3(msgspec.Struct, kw_only=True):
    vision_config: _SiglipTower
    text_config: _Gemma3Text = msgspec.field(default_factory=_Gemma3Text)
    mm_tokens_per_image: int = 256
    boi_token_index: int = 255999
    eoi_token_index: int = 256000
    image_token_index: int = 262144


class _Gemma4Tower(msgspec.Struct, kw_only=True):
    """The tower of Gemma 4. Its defaults are transformers'."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool | None = False
    rope_parameters: dict[str, Any] | None = None
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False


class _Gemma4Text(msgspec.Struct, kw_only=True):
    hidden_size: int = 2304
    vocab_size: int = 262144
    pad_token_id: int | None = 0


class _Gemma4(msgspec.Struct, kw_only=True):
    vision_config: _Gemma4Tower
    text_config: _Gemma4Text = msgspec.field(default_factory=_Gemma4Text)
    boi_token_id: int = 255999
    eoi_token_id: int = 258882
    image_token_id: int = 258880


def read_gemma3(fields: Mapping[str, Any], image: Processor, video: Processor) -> VisionSpec:
    """Read SigLIP's tower and a projector of averages; `video` says nothing.

    Raises:
        Unsupported: a value that is not supported.
    """
    model = msgspec.convert(dict(fields), _Gemma3)
    tower, text = model.vision_config, model.text_config
    patches, tokens = tower.image_size // max(1, tower.patch_size), isqrt(max(0, model.mm_tokens_per_image))
    size = image.size or Size(height=tower.image_size, width=tower.image_size)
    heads, resample = tower.num_attention_heads, 2 if image.resample is None else image.resample
    check(
        {
            "vision_config.hidden_act": tower.hidden_act == "gelu_pytorch_tanh",
            "vision_config.layer_norm_eps": tower.layer_norm_eps == 1e-6,
            "vision_config.num_channels": tower.num_channels == 3,
            "vision_config.num_attention_heads": heads > 0 and tower.hidden_size % (2 * heads) == 0,
            "vision_config.patch_size": tower.patch_size > 0 and tower.image_size == patches * tower.patch_size > 0,
            "mm_tokens_per_image": tokens > 0 and tokens**2 == model.mm_tokens_per_image and patches % tokens == 0,
            "image_token_index": 0 <= model.image_token_index < text.vocab_size,
            "size, of the image processor,": (size.height, size.width) == (tower.image_size,) * 2,
            "resample, of the image processor,": resample in _FILTERS,
            "do_pan_and_scan": not image.do_pan_and_scan,
            "do_resize": image.do_resize is not False,
            "do_normalize": image.do_normalize is not False,
        }
    )
    return VisionSpec(
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=heads,
        out_size=text.hidden_size,
        is_pooled=True,
        table_side=patches,
        theta=0.0,
        patch_size=tower.patch_size,
        merge=patches // tokens,
        frames=1,
        sections=(),
        takes_videos=False,
        side=tower.image_size,
        filter=_FILTERS[resample],
        mean=image.image_mean or (0.5, 0.5, 0.5),
        std=image.image_std or (0.5, 0.5, 0.5),
        is_start_shown=True,
        **_marks(model.image_token_index, model.boi_token_index, model.eoi_token_index),
    )


def read_gemma4(fields: Mapping[str, Any], image: Processor, video: Processor) -> VisionSpec:
    """Read a tower of axial blocks; `video` says nothing.

    Raises:
        Unsupported: a value that is not supported.
    """
    model = msgspec.convert(dict(fields), _Gemma4)
    tower, text, rope = model.vision_config, model.text_config, model.vision_config.rope_parameters or {}
    heads = tower.num_attention_heads, tower.num_key_value_heads
    pooled, most = tower.pooling_kernel_size, image.max_soft_tokens
    check(
        {
            "vision_config.hidden_activation": tower.hidden_activation == "gelu_pytorch_tanh",
            "vision_config.attention_bias": not tower.attention_bias,
            "vision_config.rope_parameters": rope.get("rope_type", "axial") == "axial",
            "vision_config.num_key_value_heads": min(heads) > 0 and heads[0] % heads[1] == 0,
            "vision_config.head_dim": tower.head_dim > 0 and tower.head_dim % 4 == 0,
            "vision_config.pooling_kernel_size": pooled > 0 and image.pooling_kernel_size in (None, pooled),
            "vision_config.patch_size": tower.patch_size > 0 and image.patch_size in (None, tower.patch_size),
            "vision_config.position_embedding_size": 0 < most * pooled <= tower.position_embedding_size,
            "image_token_id": 0 <= model.image_token_id < text.vocab_size,
            "resample, of the image processor,": image.resample in (None, 3),
            "do_resize": image.do_resize is not False,
            "do_normalize": not image.do_normalize,
        }
    )
    return VisionSpec(
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=heads[0],
        out_size=text.hidden_size,
        axial=_axial(tower),
        theta=float(rope.get("rope_theta", 100.0)),
        patch_size=tower.patch_size,
        merge=pooled,
        frames=1,
        sections=(),
        takes_videos=False,
        most_tokens=most,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        is_image_shown=True,
        stand_in_id=text.pad_token_id or 0,
        **_marks(model.image_token_id, model.boi_token_id, model.eoi_token_id),
    )


def _axial(tower: _Gemma4Tower) -> AxialBlocks:
    heads, num_positions = (tower.num_key_value_heads, tower.head_dim), tower.position_embedding_size
    return AxialBlocks(*heads, num_positions, tower.rms_norm_eps, tower.use_clipped_linears, tower.standardize)


def _marks(image: int, start: int, end: int) -> dict[str, Any]:
    """Return the tokens of an image; there are no videos."""
    return {"image_token_id": image, "video_token_id": image, "start_token_id": start, "end_token_id": end}
