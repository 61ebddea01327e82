"""Chats with images, on the text worker's side: images taken out of messages, placeholders put into the prompt.

Text never spells a placeholder: where a client has typed one, its characters are encoded one part after the other.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import re
import secrets
from collections.abc import Callable
from typing import Any

from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.media import MediaInput, MediaSpan, content_digest
from tokenmill.vision.decoding import ImageDecoder, ImageLimits
from tokenmill.vision.spec import VisionSpec

_DATA_URL = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w.+=-]+)*?;base64,", re.ASCII)
# Characters of a URL in which its head is looked for.
_LONGEST_HEAD = 200
# Bytes of a file; a PNG of the most pixels that are decoded is rarely larger.
MOST_BYTES = 32 << 20


class MediaPrompts:
    """Makes prompts of chats with images, for one model.

    Args:
        limit: images of a request.
        encode: text -> token ids, special tokens among them.
        special_tokens: as text, what clients must not spell.

    Raises:
        InvalidConfig: Pillow is missing.
    """

    def __init__(
        self, spec: VisionSpec, limit: int, encode: Callable[[str], list[int]], special_tokens: list[str]
    ) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise InvalidConfig("this model takes images, which Pillow decodes: pip install 'tokenmill[vision]'")
        self._spec = spec
        self._limit = limit
        self._encode = encode
        self._special_tokens = special_tokens
        self._processor = f"qwen3-vl/{spec.factor}/{spec.min_pixels}/{spec.max_pixels}/{spec.mean}/{spec.std}"
        self._decoder = ImageDecoder(ImageLimits(spec.factor, spec.min_pixels, spec.max_pixels))

    def take_images(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Messages with a bare image part for each image, and the URLs of these, in order.

        Raises:
            InvalidRequest: there are more than a request may have.
        """
        urls: list[str] = []
        bare = [{**message, "content": _without_url(message.get("content"), urls)} for message in messages]
        if len(urls) > self._limit:
            raise InvalidRequest(f"{len(urls)} images; at most {self._limit} (--limit-mm-per-prompt)", "messages")
        return bare, urls

    def hide(self, value: Any) -> tuple[Any, str]:
        """Messages or tools in which typed special tokens are replaced, and the mark by which `encode` finds them."""
        mark = secrets.token_hex(12)
        return self._hidden(value, mark), mark

    def encode(self, text: str, mark: str) -> list[int]:
        """The tokens of a rendered chat: special where the template has put them, plain where a client has."""
        pieces = re.split(f"{mark}:([0-9]):", text)
        token_ids = self._encode(pieces[0])
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            typed = self._special_tokens[int(number)]
            token_ids += self._encode(typed[:2]) + self._encode(typed[2:]) + self._encode(piece)
        return token_ids

    def place(self, token_ids: list[int], urls: list[str]) -> tuple[list[int], list[MediaInput]]:
        """Decode the images, and give each as many placeholders as it needs.

        Raises:
            InvalidRequest: an image cannot be decoded, or the template has not shown each once.
        """
        pad = self._spec.image_token_id
        if token_ids.count(pad) != len(urls):
            raise InvalidRequest("the chat template does not show every image once", "messages")
        placed: list[int] = []
        media: list[MediaInput] = []
        start = 0
        for url in urls:
            place = token_ids.index(pad, start)
            placed += token_ids[start:place]
            media.append(self._image(url, len(placed)))
            placed += [pad] * media[-1].span.length
            start = place + 1
        return placed + token_ids[start:], media

    def close(self) -> None:
        """End the process that decodes."""
        self._decoder.close()

    def _image(self, url: str, offset: int) -> MediaInput:
        head, pixels = self._decoder.decode(data_of(url))
        rows, columns = head.height // self._spec.patch_size, head.width // self._spec.patch_size
        digest = content_digest(pixels, head.height, head.width, self._processor)
        length = rows * columns // self._spec.merge**2
        return MediaInput(MediaSpan(offset, length, digest, rows, columns, self._spec.image_token_id), pixels)

    def _hidden(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            for number, typed in enumerate(self._special_tokens):
                value = value.replace(typed, f"{mark}:{number}:")
            return value
        if isinstance(value, dict):
            return {self._hidden(key, mark): self._hidden(item, mark) for key, item in value.items()}
        return [self._hidden(item, mark) for item in value] if isinstance(value, list) else value


def data_of(url: str) -> bytes:
    """The bytes of a data: URL.

    Raises:
        InvalidRequest: it is none, not base64, or too large.
    """
    head = _DATA_URL.match(url[:_LONGEST_HEAD])
    if head is None:
        raise InvalidRequest("an image must be a data: URL in base64; nothing is fetched", "messages")
    if 3 * (len(url) - head.end()) // 4 > MOST_BYTES:
        raise InvalidRequest(f"an image of more than {MOST_BYTES >> 20} MiB", "messages")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data: URL of an image is not base64", "messages") from None


def _without_url(content: Any, urls: list[str]) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if part["type"] == "image":
            raise InvalidRequest("an image part is {'type': 'image_url', 'image_url': {'url': ...}}", "messages")
        if part["type"] == "image_url":
            urls.append(part["image_url"]["url"])
        parts.append({"type": "image"} if part["type"] == "image_url" else part)
    return parts
