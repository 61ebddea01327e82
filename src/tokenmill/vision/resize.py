"""The size to which an image is brought before its patches are taken: Qwen2-VL's rule, as transformers has it."""

from __future__ import annotations

import math

from tokenmill.core.errors import InvalidRequest

MOST_ASPECT = 200


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width, multiples of `factor` within the limits, close to the given proportions.

    Raises:
        InvalidRequest: one side is more than 200 times the other.
    """
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise InvalidRequest(
            f"an image of {width} x {height} pixels: one side is more than {MOST_ASPECT} times the other", "messages"
        )
    # Python rounds a half to the even number, and so must whoever wants the same size.
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
