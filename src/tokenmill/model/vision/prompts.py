"""Chats with images and videos, on the text worker's side: taken out of messages, placeholders put into the prompt.

A video is a list of frames. As many of them as the tower takes at once (two) are a span of their own, with the time at
which they are shown before it as text: "<0.2 seconds>".

Text never spells a placeholder: where a client has typed one, its characters are encoded one part after the other.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenmill.config.vision import MediaLimits
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.media import MediaInput, MediaSpan, content_digest
from tokenmill.model.vision.decoding import ImageDecoder
from tokenmill.model.vision.resize import SizeRule
from tokenmill.model.vision.spec import VisionSpec

_FORMS = {
    "image": "an image part is {'type': 'image_url', 'image_url': {'url': ...}}",
    "video": "a video part is {'type': 'video', 'video': [the URLs of its frames], 'fps': 2}",
}
_DATA_URL = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w.+=-]+)*?;base64,", re.ASCII)
# Characters of a URL in which its head is looked for.
_LONGEST_HEAD = 200
# Bytes of a file; a PNG of the most pixels that are decoded is rarely larger.
MOST_BYTES = 32 << 20
# Frames of a video: a pair at least, and what the model's processor samples at most.
FEWEST_FRAMES, MOST_FRAMES = 2, 768
# For all images of a request.
MOST_SECONDS = 30.0


class MediaItem(NamedTuple):
    """An image, or the frames of a video: data: URLs. `fps`: frames a second; 0: it is an image."""

    urls: list[str]
    fps: float = 0.0


class _Content(NamedTuple):
    """The content of a span; see `MediaSpan`."""

    pixels: bytes
    height: int
    width: int
    token_id: int


class MediaPrompts:
    """Makes prompts of chats with images and videos, for one model.

    Args:
        limits: what a request may have.
        encode: text -> token ids, special tokens among them.
        special_tokens: those of the spec as text, which clients must not spell.

    Raises:
        InvalidConfig: Pillow is missing.
    """

    def __init__(
        self,
        spec: VisionSpec,
        limits: MediaLimits,
        encode: Callable[[str], list[int]],
        special_tokens: Mapping[int, str],
    ) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise InvalidConfig("this model takes images, which Pillow decodes: pip install 'tokenmill[vision]'")
        self._spec = spec
        self._limits = limits
        self._encode = encode
        self._special_tokens = list(special_tokens.values())
        marks = (spec.start_token_id, spec.video_token_id, spec.end_token_id)
        self._start, self._video, self._end = (special_tokens.get(token_id, "") for token_id in marks)
        self._processor = f"{spec.patch_size}/{spec.factor}/{spec.min_pixels}/{spec.max_pixels}/{spec.mean}/{spec.std}"
        self._decoder = ImageDecoder()

    def take_media(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaItem]]:
        """Return messages with a bare part for each image and video, and the media that these show, in order.

        Raises:
            InvalidRequest: there are more than a request may have.
        """
        items: list[MediaItem] = []
        bare = [{**message, "content": _bare(message.get("content"), items)} for message in messages]
        num_videos = sum(bool(item.fps) for item in items)
        if num_videos and not self._spec.takes_videos:
            raise InvalidRequest("this model's videos are not supported; its images are", "messages")
        counts = {"images": (len(items) - num_videos, self._limits.image), "videos": (num_videos, self._limits.video)}
        for what, (count, most) in counts.items():
            if count > most:
                raise InvalidRequest(f"{count} {what}; at most {most} (--limit-mm-per-prompt)", "messages")
        return bare, items

    def hide(self, value: Any) -> tuple[Any, str]:
        """Return messages or tools with typed special tokens replaced, and the mark by which `encode` finds them."""
        mark = secrets.token_hex(12)
        return self._hidden(value, mark), mark

    def encode(self, text: str, mark: str, items: Sequence[MediaItem]) -> list[int]:
        """Return the tokens of a rendered chat: special where the template has put them, plain where a client has.

        Raises:
            InvalidRequest: the template has not shown each video once.
        """
        pieces = re.split(f"{mark}:([0-9]):", self._with_times(text, items))
        token_ids = self._encode(pieces[0])
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            typed = self._special_tokens[int(number)]
            token_ids += self._encode(typed[:2]) + self._encode(typed[2:]) + self._encode(piece)
        return token_ids

    def place(self, token_ids: list[int], items: Sequence[MediaItem]) -> tuple[list[int], list[MediaInput]]:
        """Decode what a chat shows, and give each span as many placeholders as it needs.

        Raises:
            InvalidRequest: an image cannot be decoded, or the template has not shown each once.
        """
        pads = self._spec.image_token_id, self._spec.video_token_id
        expected = [pads[bool(item.fps)] for item in items for _ in range(self._num_spans(item))]
        if [token_id for token_id in token_ids if token_id in pads] != expected:
            raise InvalidRequest("the chat template does not show every image and video once", "messages")
        deadline = time.monotonic() + MOST_SECONDS
        placed: list[int] = []
        media: list[MediaInput] = []
        start = 0
        for content in [content for item in items for content in self._contents(item, deadline)]:
            place = token_ids.index(content.token_id, start)
            placed += token_ids[start:place]
            media.append(self._input(content, len(placed)))
            placed += [content.token_id] * media[-1].span.length
            start = place + 1
        return placed + token_ids[start:], media

    def close(self) -> None:
        """End the process that decodes."""
        self._decoder.close()

    def _num_spans(self, item: MediaItem) -> int:
        return -(-len(item.urls) // self._spec.frames) if item.fps else 1

    def _with_times(self, text: str, items: Sequence[MediaItem]) -> str:
        """Return a rendered chat with a placeholder for each span of a video, its time before it."""
        videos = [item for item in items if item.fps]
        if not videos:
            return text
        mark = self._start + self._video + self._end
        pieces = text.split(mark)
        if len(pieces) != len(videos) + 1 or not all((self._start, self._video, self._end)):
            raise InvalidRequest("the chat template does not show every video once", "messages")
        shown = ("".join(f"<{at:.1f} seconds>{mark}" for at in self._times(video)) for video in videos)
        return pieces[0] + "".join(one + piece for one, piece in zip(shown, pieces[1:], strict=True))

    def _times(self, video: MediaItem) -> list[float]:
        """Return the time of each span of a video, midway between its frames; the last frame fills the last span."""
        times = [index / video.fps for index in range(len(video.urls))]
        together = self._spec.frames
        times += times[-1:] * (-len(times) % together)
        return [(times[at] + times[at + together - 1]) / 2 for at in range(0, len(times), together)]

    def _contents(self, item: MediaItem, deadline: float) -> list[_Content]:
        if not item.fps:
            return [_Content(*self._decode(item.urls[0], self._spec.size_rule(), deadline), self._spec.image_token_id)]
        rule, together = self._spec.size_rule(len(item.urls)), self._spec.frames
        frames = [self._decode(url, rule, deadline) for url in item.urls]
        if len({(height, width) for _, height, width in frames}) > 1:
            raise InvalidRequest("the frames of a video must be of one size", "messages")
        frames += frames[-1:] * (-len(frames) % together)
        _, height, width = frames[0]
        pairs = (frames[at : at + together] for at in range(0, len(frames), together))
        return [_Content(b"".join(f[0] for f in pair), height, width, self._spec.video_token_id) for pair in pairs]

    def _decode(self, url: str, rule: SizeRule, deadline: float) -> tuple[bytes, int, int]:
        if time.monotonic() > deadline:
            raise InvalidRequest(f"to decode the images of this request takes over {MOST_SECONDS:g} s", "messages")
        head, pixels = self._decoder.decode(data_of(url), rule)
        return pixels, head.height, head.width

    def _input(self, content: _Content, offset: int) -> MediaInput:
        rows, columns = content.height // self._spec.patch_size, content.width // self._spec.patch_size
        digest = content_digest(content.pixels, content.height, content.width, self._processor)
        length = rows * columns // self._spec.merge**2
        return MediaInput(MediaSpan(offset, length, digest, rows, columns, content.token_id), content.pixels)

    def _hidden(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            for number, typed in enumerate(self._special_tokens):
                value = value.replace(typed, f"{mark}:{number}:")
            return value
        if isinstance(value, dict):
            return {self._hidden(key, mark): self._hidden(item, mark) for key, item in value.items()}
        return [self._hidden(item, mark) for item in value] if isinstance(value, list) else value


def has_media(messages: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return True if a chat has parts that are not text."""
    contents = (message.get("content") for message in messages or ())
    return any(part.get("type") != "text" for parts in contents if isinstance(parts, list) for part in parts)


def data_of(url: str) -> bytes:
    """Return the bytes of a data: URL.

    Raises:
        InvalidRequest: it is no data: URL, not base64, or too large.
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


def _bare(content: Any, items: list[MediaItem]) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if part["type"] == "text":
            parts.append(part)
            continue
        items.append(_item(part))
        parts.append({"type": "video" if items[-1].fps else "image"})
    return parts


def _item(part: dict[str, Any]) -> MediaItem:
    if part["type"] == "image_url":
        return MediaItem([part["image_url"]["url"]])
    if "video" not in part:
        raise InvalidRequest(_FORMS[part["type"]], "messages")
    if not FEWEST_FRAMES <= len(part["video"]) <= MOST_FRAMES:
        sentence = f"a video of {len(part['video'])} frames; {FEWEST_FRAMES} to {MOST_FRAMES} are taken"
        raise InvalidRequest(sentence, "messages")
    return MediaItem(part["video"], part["fps"])
