"""`VisionConfig`: the flags of models that take images or sound; `EngineConfig` has them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from tokenmill.config.fields import flag
from tokenmill.core.errors import InvalidConfig

IMAGES_PER_PROMPT, VIDEOS_PER_PROMPT, CLIPS_PER_PROMPT = 8, 1, 8
STORE_BYTES = 1 << 30
EC_CONNECTOR = "ECExampleConnector"


class MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most images, videos and clips of sound of one request."""

    image: int = IMAGES_PER_PROMPT
    video: int = VIDEOS_PER_PROMPT
    audio: int = CLIPS_PER_PROMPT


class _ECExtra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shared_storage_path: str = "/tmp"  # vLLM's


class ECTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of `--ec-transfer-config`, with vLLM's names; a producer only saves, a consumer only loads."""

    ec_connector: str
    ec_role: Literal["ec_producer", "ec_consumer", "ec_both"]
    ec_connector_extra_config: _ECExtra = _ECExtra()


class EncoderStore(msgspec.Struct, frozen=True):
    """Settings of the store of encoder outputs. `folder`: None: in memory, for what encoder servers send."""

    folder: str | None
    num_bytes: int
    loads: bool = True
    saves: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The settings for images and sound; models that take text only ignore them."""

    encoder_budget: int = flag(4096, "tokens of images and sound that a step encodes at most", size=True)
    encoder_cache_tokens: int = flag(
        8192, "tokens of images and sound whose encoder outputs are kept at most", size=True
    )
    encoder_store: str | None = flag(None, "folder through which engines share the encoder outputs of images and sound")
    encoder_store_size: int | None = flag(None, "bytes that these outputs may take (auto: 1 GiB)", size=True)
    encoder_urls: tuple[str, ...] = flag(
        (), "server with --encoder-only that encodes images and sound for this one; may be repeated", repeat=True
    )
    encoder_api_key: str = flag("", "key that these servers require")
    ec_transfer_config: str | None = flag(
        None, "JSON: share encoder outputs in a folder, in vLLM's words for --encoder-store", json=True
    )
    disable_chunked_mm_input: bool = flag(False, "a step does not end within an image or a clip of sound")
    language_model_only: bool = flag(
        False, "leave out the vision tower or the encoder of sound: prompts are text, and all features of text work"
    )
    limit_mm_per_prompt: str | None = flag(
        None,
        "images, videos and clips of sound of one request at most, as JSON (auto: "
        f'{{"image": {IMAGES_PER_PROMPT}, "video": {VIDEOS_PER_PROMPT}, "audio": {CLIPS_PER_PROMPT}}})',
        json=True,
    )

    def encoder_outputs(self) -> EncoderStore | None:
        """Return the store of encoder outputs; None: the engine neither shares them nor gets them from elsewhere.

        Raises:
            InvalidConfig: the JSON is not as vLLM has it, or two folders are named.
        """
        num_bytes = self.encoder_store_size or STORE_BYTES
        if self.ec_transfer_config is None or self.ec_transfer_config.strip() in ("{}", "null"):
            is_on = self.encoder_store or self.encoder_urls
            return EncoderStore(self.encoder_store, num_bytes) if is_on else None
        try:
            config = msgspec.json.decode(self.ec_transfer_config, type=ECTransferConfig)
        except msgspec.DecodeError as error:
            raise InvalidConfig(f"--ec-transfer-config: {error}") from error
        if config.ec_connector != EC_CONNECTOR:
            raise InvalidConfig(f"--ec-transfer-config: the only ec_connector is {EC_CONNECTOR}, a folder")
        if self.encoder_store is not None:
            raise InvalidConfig("--ec-transfer-config and --encoder-store both name a folder: leave one of them out")
        folder, role = config.ec_connector_extra_config.shared_storage_path, config.ec_role
        return EncoderStore(folder, num_bytes, role != "ec_producer", role != "ec_consumer")

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
