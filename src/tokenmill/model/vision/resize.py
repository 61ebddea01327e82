"""The size to which an image or a frame is brought before its patches are taken, as transformers has it: Qwen2-VL's
rule for images, Qwen3-VL's for videos.
"""

from __future__ import annotations

import math

import msgspec

from tokenmill.core.errors import InvalidRequest

MOST_ASPECT = 200


class SizeRule(msgspec.Struct, frozen=True):
    """The rule by which images of a kind are resized.

    Attributes:
        factor: sides are multiples of it.
        min_pixels, max_pixels: of an image; of all frames of a video together.
        num_frames: of the video that it is of; 0: an image by itself.
        together: frames of a video that are encoded as one.
        side: of the square to which every image is brought, whatever its proportions; 0: these are kept.
        filter: Pillow's name of how pixels are resampled.
        most_tokens: squares of `factor` in an image at most, of which it has about as many; 0: other limits count.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    num_frames: int = 0
    together: int = 2
    side: int = 0
    filter: str = "BICUBIC"
    most_tokens: int = 0

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the resized height and width of an image of this size.

        Raises:
            InvalidRequest: one side is more than 200 times the other, and proportions are kept.
        """
        if self.side:
            return self.side, self.side
        if self.most_tokens:
            return budget_resize(height, width, self.factor, self.most_tokens)
        if not self.num_frames:
            return smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return frame_resize(self, height, width)


def budget_resize(height: int, width: int, factor: int, most_tokens: int) -> tuple[int, int]:
    """Return the largest height and width, multiples of `factor`, of so many squares at most; as Gemma 4 has it."""
    scale = math.sqrt(most_tokens * factor**2 / (height * width))
    rows, columns = (math.floor(scale * side / factor) for side in (height, width))
    if not rows:
        rows, columns = 1, min(math.floor(width / height), most_tokens)
    elif not columns:
        rows, columns = min(math.floor(height / width), most_tokens), 1
    return rows * factor, columns * factor


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return height and width, multiples of `factor` within the limits, close to the given proportions.

    Raises:
        InvalidRequest: one side is more than 200 times the other.
    """
    _check_aspect(height, width)
    # Python rounds a half to the even number, as must all code that wants the same size.
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def frame_resize(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    """Return height and width of every frame of a video, whose frames share the pixels that a video may have.

    Raises:
        InvalidRequest: one side is more than 200 times the other.
    """
    factor, frames = rule.factor, rule.num_frames
    if min(height, width) < factor:
        grow = max(factor / height, factor / width)
        height, width = int(height * grow), int(width * grow)
    _check_aspect(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    num_pixels = round(frames / rule.together) * rule.together * rows * columns
    if num_pixels > rule.max_pixels:
        shrink = math.sqrt(frames * height * width / rule.max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif num_pixels < rule.min_pixels:
        grow = math.sqrt(rule.min_pixels / (frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise InvalidRequest(
            f"an image of {width} x {height} pixels: one side is more than {MOST_ASPECT} times the other", "messages"
        )
