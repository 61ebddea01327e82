"""Read what image processors' configs say, for all readers of `VisionSpec`. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

Three = tuple[float, float, float]


class Size(msgspec.Struct, kw_only=True):
    """Pixels of an image; or both sides of the square that each is brought to."""

    shortest_edge: int = 0
    longest_edge: int = 0
    height: int = 0
    width: int = 0


class Processor(msgspec.Struct):
    """The image processor's config. Its defaults are those of published checkpoints; transformers' are of older
    models."""

    size: Size | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    image_mean: Three | None = None
    image_std: Three | None = None
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int | None = None
    resample: int | None = None
    do_pan_and_scan: bool | None = None
    do_resize: bool | None = None
    do_normalize: bool | None = None
    max_soft_tokens: int = 280
    patch_size: int | None = None
    pooling_kernel_size: int | None = None

    def pixels(self, default: tuple[int, int]) -> tuple[int, int]:
        """Return the least and the most pixels, as newer or as older files name them."""
        if self.size is not None and self.size.longest_edge:
            return self.size.shortest_edge, self.size.longest_edge
        return self.min_pixels or default[0], self.max_pixels or default[1]


class Unsupported(Exception):
    """A field with a value that is not supported."""


def check(fields: Mapping[str, bool]) -> None:
    """Raise `Unsupported` for the first that is false."""
    for field, is_right in fields.items():
        if not is_right:
            raise Unsupported(field)
