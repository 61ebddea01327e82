"""Read the images and videos of chats, on the text worker's side.

A video is a list of frames. As many of them as the tower takes at once (two) are a span of their own, with the time at
which they are shown before it as text: "<0.2 seconds>".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tokenmill.config.vision import MediaLimits
from tokenmill.core.data_url import data_of
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.media import MediaInput, MediaSpan, content_digest
from tokenmill.model.vision.decoding import ImageDecoder
from tokenmill.model.vision.resize import SizeRule
from tokenmill.model.vision.spec import VisionSpec

_FORMS = {
    "image": "an image part is {'type': 'image_url', 'image_url': {'url': ...}}",
    "video": "a video part is {'type': 'video', 'video': [the URLs of its frames], 'fps': 2}",
    "audio": "this model takes no sound; it takes images",
    "audio_url": "this model takes no sound; it takes images",
}
# Frames of a video: a pair at least, and what the model's processor samples at most.
FEWEST_FRAMES, MOST_FRAMES = 2, 768


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


class ImageReader:
    """Reads the images and videos of chats, for one model; see `MediaReader`.

    Args:
        limits: what a request may have.
        special_tokens: those of the spec as text.

    Raises:
        InvalidConfig: Pillow is missing.
    """

    nouns = "images"
    everything = "every image and video"

    def __init__(self, spec: VisionSpec, limits: MediaLimits, special_tokens: Mapping[int, str]) -> None:
        if importlib.util.find_spec("PIL") is None:
            raise InvalidConfig("this model takes images, which Pillow decodes: pip install 'tokenmill[vision]'")
        self._spec = spec
        self._limits = limits
        self.placeholders: tuple[int, ...] = spec.image_token_id, spec.video_token_id
        marks = (spec.start_token_id, spec.image_token_id, spec.video_token_id, spec.end_token_id)
        self._start, self._image, self._video, self._end = (special_tokens.get(token_id, "") for token_id in marks)
        self._processor = f"{spec.patch_size}/{spec.factor}/{spec.min_pixels}/{spec.max_pixels}/{spec.mean}/{spec.std}"
        self._processor += f"/{spec.side}/{spec.filter}" if spec.side else ""
        self._processor += f"/{spec.most_tokens}" if spec.most_tokens else ""
        self._decoder = ImageDecoder()

    def take(self, part: dict[str, Any]) -> tuple[dict[str, Any], MediaItem]:
        """Return what a template is shown of a part, and the item that it shows."""
        item = _item(part)
        return {"type": "video" if item.fps else "image"}, item

    def check(self, items: Sequence[MediaItem]) -> None:
        """Refuse more images and videos than a request may have."""
        num_videos = sum(bool(item.fps) for item in items)
        if num_videos and not self._spec.takes_videos:
            raise InvalidRequest("this model's videos are not supported; its images are", "messages")
        counts = {"images": (len(items) - num_videos, self._limits.image), "videos": (num_videos, self._limits.video)}
        for what, (count, most) in counts.items():
            if count > most:
                raise InvalidRequest(f"{count} {what}; at most {most} (--limit-mm-per-prompt)", "messages")

    def pads(self, item: MediaItem) -> list[int]:
        """Return the placeholder of each span of an item."""
        num_spans = -(-len(item.urls) // self._spec.frames) if item.fps else 1
        return [self.placeholders[bool(item.fps)]] * num_spans

    def inputs(self, item: MediaItem, check_time: Callable[[], None]) -> Iterator[MediaInput]:
        """Decode an image, or a video's frames."""
        inputs = map(self._input, self._contents(item, check_time))
        if not (item.fps and self._spec.tokens_per_second):
            return inputs
        # As transformers rounds: in float32, at the end.
        step = np.float32(self._spec.tokens_per_second) * np.float32(self._spec.frames / item.fps)
        return (_at(one, number, step) for number, one in enumerate(inputs))

    def close(self) -> None:
        """End the process that decodes."""
        self._decoder.close()

    def shown(self, text: str, items: Sequence[MediaItem]) -> str:
        """Return a rendered chat with a placeholder for each image and each span of a video, its time before it."""
        if self._spec.is_start_shown:
            whole = f"\n\n{self._start}{self._image}{self._end}\n\n"
            return text.replace(self._start, whole) if self._start else text
        if self._spec.is_image_shown:
            return text.replace(self._image, f"{self._start}{self._image}{self._end}") if self._image else text
        videos = [item for item in items if item.fps]
        if not videos:
            return text
        mark = self._start + self._video + self._end
        pieces = text.split(mark)
        if len(pieces) != len(videos) + 1 or not all((self._start, self._video, self._end)):
            raise InvalidRequest("the chat template does not show every video once", "messages")
        shown: Iterable[str]
        if self._spec.tokens_per_second:
            shown = (self._start + self._video * len(self.pads(video)) + self._end for video in videos)
        else:
            shown = ("".join(f"<{at:.1f} seconds>{mark}" for at in self._times(video)) for video in videos)
        return pieces[0] + "".join(one + piece for one, piece in zip(shown, pieces[1:], strict=True))

    def _times(self, video: MediaItem) -> list[float]:
        """Return the time of each span of a video, midway between its frames; the last frame fills the last span."""
        times = [index / video.fps for index in range(len(video.urls))]
        together = self._spec.frames
        times += times[-1:] * (-len(times) % together)
        return [(times[at] + times[at + together - 1]) / 2 for at in range(0, len(times), together)]

    def _contents(self, item: MediaItem, check_time: Callable[[], None]) -> list[_Content]:
        if not item.fps:
            return [
                _Content(*self._decode(item.urls[0], self._spec.size_rule(), check_time), self._spec.image_token_id)
            ]
        rule, together = self._spec.size_rule(len(item.urls)), self._spec.frames
        frames = [self._decode(url, rule, check_time) for url in item.urls]
        if len({(height, width) for _, height, width in frames}) > 1:
            raise InvalidRequest("the frames of a video must be of one size", "messages")
        frames += frames[-1:] * (-len(frames) % together)
        _, height, width = frames[0]
        pairs = (frames[at : at + together] for at in range(0, len(frames), together))
        return [_Content(b"".join(f[0] for f in pair), height, width, self._spec.video_token_id) for pair in pairs]

    def _decode(self, url: str, rule: SizeRule, check_time: Callable[[], None]) -> tuple[bytes, int, int]:
        check_time()
        head, pixels = self._decoder.decode(data_of(url), rule)
        return pixels, head.height, head.width

    def _input(self, content: _Content) -> MediaInput:
        rows, columns = content.height // self._spec.patch_size, content.width // self._spec.patch_size
        digest = content_digest(content.pixels, content.height, content.width, self._processor)
        length = rows * columns // self._spec.merge**2
        return MediaInput(MediaSpan(0, length, digest, rows, columns, content.token_id), content.pixels)


def _at(one: MediaInput, number: int, step: np.float32) -> MediaInput:
    """Return frames of a video at their place in it: the `number`-th, `step` positions behind those before them."""
    span = one.span._replace(time=int(np.float32(number) * step), before=number * one.span.length)
    return MediaInput(span, one.content)


def _item(part: dict[str, Any]) -> MediaItem:
    if part["type"] == "image_url":
        return MediaItem([part["image_url"]["url"]])
    if "video" not in part:
        raise InvalidRequest(_FORMS[part["type"]], "messages")
    if not FEWEST_FRAMES <= len(part["video"]) <= MOST_FRAMES:
        sentence = f"a video of {len(part['video'])} frames; {FEWEST_FRAMES} to {MOST_FRAMES} are taken"
        raise InvalidRequest(sentence, "messages")
    return MediaItem(part["video"], part["fps"])
