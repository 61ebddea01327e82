"""`VisionConfig`: the flags of models that take images or sound; `EngineConfig` has them all."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tokenmill.config.fields import flag
from tokenmill.core.errors import InvalidConfig

IMAGES_PER_PROMPT, VIDEOS_PER_PROMPT, CLIPS_PER_PROMPT = 8, 1, 8


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most images, videos and clips of sound of one request."""

    image: int = IMAGES_PER_PROMPT
    video: int = VIDEOS_PER_PROMPT
    audio: int = CLIPS_PER_PROMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The settings for images and sound; models that take text only ignore them."""

    encoder_budget: int = flag(4096, "tokens of images and sound that a step encodes at most", size=True)
    encoder_cache_tokens: int = flag(
        8192, "tokens of images and sound whose encoder outputs are kept at most", size=True
    )
    disable_chunked_mm_input: bool = flag(False, "a step does not end within an image or a clip of sound")
    limit_mm_per_prompt: str | None = flag(
        None,
        "images, videos and clips of sound of one request at most, as JSON (auto: "
        f'{{"image": {IMAGES_PER_PROMPT}, "video": {VIDEOS_PER_PROMPT}, "audio": {CLIPS_PER_PROMPT}}})',
        json=True,
    )

    def media_limits(self) -> MediaLimits:
        """Return the limits on images, videos and clips of one request.

        Raises:
            InvalidConfig: the flag is neither JSON nor `image=4,video=0`, or a limit is negative.
        """
        if self.limit_mm_per_prompt is None:
            return MediaLimits()
        given = self.limit_mm_per_prompt
        try:
            if given.lstrip().startswith("{"):
                limits = msgspec.json.decode(given, type=MediaLimits)
            else:
                pairs = dict(pair.split("=", 1) for pair in given.split(","))
                limits = msgspec.convert(pairs, MediaLimits, strict=False)
        except (msgspec.DecodeError, ValueError) as error:
            raise InvalidConfig(f'--limit-mm-per-prompt takes JSON, {{"image": 4}}: {error}') from error
        if min(limits.image, limits.video, limits.audio) < 0:
            raise InvalidConfig("--limit-mm-per-prompt: image, video and audio must be 0 or more")
        return limits
