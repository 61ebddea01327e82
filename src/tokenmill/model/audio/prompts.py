"""Read the clips of sound in chats, on the text worker's side."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenmill.config.vision import MediaLimits
from tokenmill.core.data_url import data_of
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.media import MediaInput, MediaSpan, content_digest
from tokenmill.model.audio.decoding import SoundDecoder
from tokenmill.model.audio.spec import RATE, AudioSpec

_FORM = "a clip is {'type': 'input_audio', 'input_audio': {'data': ..., 'format': 'wav'}}"


class SoundReader:
    """Reads the clips of chats, for one model; an item is the data: URL of a clip. See `MediaReader`.

    Args:
        limits: what a request may have.

    Raises:
        InvalidConfig: soundfile is missing.
    """

    nouns = "clips of sound"
    everything = "every clip of sound"

    def __init__(self, spec: AudioSpec, limits: MediaLimits) -> None:
        check_soundfile()
        self._spec = spec
        self._limits = limits
        self.placeholders: tuple[int, ...] = (spec.token_id,)
        self._decoder = SoundDecoder()

    def take(self, part: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return what a template is shown of a clip, and its URL."""
        if part["type"] not in ("audio", "audio_url"):
            raise InvalidRequest("this model takes no images and no videos; it takes sound", "messages")
        if "audio_url" not in part:
            raise InvalidRequest(_FORM, "messages")
        return {"type": "audio"}, part["audio_url"]["url"]

    def check(self, items: Sequence[str]) -> None:
        """Refuse more clips than a request may have."""
        if self._spec.is_whole and len(items) != 1:
            raise InvalidRequest(f"{len(items)} clips of sound; this model writes down one", "messages")
        if len(items) > self._limits.audio:
            sentence = f"{len(items)} clips of sound; at most {self._limits.audio} (--limit-mm-per-prompt)"
            raise InvalidRequest(sentence, "messages")

    def shown(self, text: str, items: Sequence[str]) -> str:
        """Return a rendered chat as it is: a clip is one span."""
        return text

    def pads(self, item: str) -> list[int]:
        """Return the placeholder of a clip."""
        return [self._spec.token_id]

    def inputs(self, item: str, check_time: Callable[[], None]) -> Iterator[MediaInput]:
        """Decode a clip."""
        check_time()
        samples = self._decoder.decode(data_of(item, "a clip of sound"), self._spec.max_seconds)
        # Rounded up while it was resampled, a clip of the full length may be a sample longer.
        samples = samples[: self._spec.max_samples]
        content = samples.tobytes()
        digest = content_digest(content, 0, len(samples), f"sound/{RATE}")
        span = MediaSpan(0, self._spec.num_tokens(len(samples)), digest, 0, 0, self._spec.token_id)
        return iter((MediaInput(span, content),))

    def close(self) -> None:
        """End the process that decodes."""
        self._decoder.close()


def check_soundfile() -> None:
    """Raise InvalidConfig where the package that decodes sound is missing."""
    if importlib.util.find_spec("soundfile") is None:
        raise InvalidConfig("this model takes sound, which soundfile decodes: pip install 'tokenmill[audio]'")
