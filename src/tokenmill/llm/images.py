"""Turn the images and frames in conversations of `LLM.chat`, Pillow's and files, into data: URLs."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.regular_file import read_regular

# How vLLM, and how transformers, call a part with an image that is there.
_KINDS = ("image_pil", "image")


def with_data_urls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with all images as parts of OpenAI's form, and all videos as lists of URLs.

    Takes `{"type": "image", "image": ...}` and `{"type": "image_pil", "image_pil": ...}` with an image of Pillow's or
    the path of a file, and `{"type": "video", "video": [...], "fps": 2}` with a list of these.

    Raises:
        InvalidRequest: such a part has another content, or the file cannot be read.
    """
    return [
        {**message, "content": [_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "video" and isinstance(part.get("video"), list):
        return {**part, "video": [_url(frame) for frame in part["video"]]}
    if kind not in _KINDS:
        return part
    return {"type": "image_url", "image_url": {"url": _url(part.get(kind))}}


def _url(image: Any) -> str:
    if isinstance(image, str) and image.startswith("data:"):
        return image
    return f"data:application/octet-stream;base64,{base64.b64encode(_bytes(image)).decode()}"


def _bytes(image: Any) -> bytes:
    if isinstance(image, str | Path):
        try:
            return read_regular(Path(image))
        except OSError as error:
            raise InvalidRequest(f"cannot read the image {image}: {error.strerror}", "messages") from error
    if not hasattr(image, "save"):
        raise InvalidRequest(f"an image is Pillow's or the path of a file, not {type(image).__name__}", "messages")
    buffer = io.BytesIO()
    # Without loss; what PNG cannot hold, a CMYK image say, the model would not be shown either.
    (image if image.mode in ("RGB", "RGBA", "L", "LA", "P", "1") else image.convert("RGB")).save(buffer, "PNG")
    return buffer.getvalue()
