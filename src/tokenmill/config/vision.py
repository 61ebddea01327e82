"""`VisionConfig`: the flags of models that take images; `EngineConfig` has them all."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tokenmill.config.fields import flag
from tokenmill.core.errors import InvalidConfig

IMAGES_PER_PROMPT, VIDEOS_PER_PROMPT = 8, 1


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most images and videos of one request. Sound is never accepted."""

    image: int = IMAGES_PER_PROMPT
    video: int = VIDEOS_PER_PROMPT
    audio: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The settings for images; models that take text only ignore them."""

    encoder_budget: int = flag(4096, "image tokens that a step encodes at most", size=True)
    encoder_cache_tokens: int = flag(8192, "image tokens whose encoder outputs are kept at most", size=True)
    disable_chunked_mm_input: bool = flag(False, "a step does not end within an image")
    limit_mm_per_prompt: str | None = flag(
        None,
        "images and videos of one request at most, as JSON "
        f'(auto: {{"image": {IMAGES_PER_PROMPT}, "video": {VIDEOS_PER_PROMPT}}})',
        json=True,
    )

    def media_limits(self) -> MediaLimits:
        """Return the limits on images and videos of one request.

        Raises:
            InvalidConfig: the flag is neither JSON nor `image=4,video=0`, or asks for sound.
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
        if limits.audio or min(limits.image, limits.video) < 0:
            raise InvalidConfig(
                "--limit-mm-per-prompt: image and video must be 0 or more, audio, which is not taken, 0"
            )
        return limits
