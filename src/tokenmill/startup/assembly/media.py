"""Prompts with images and sound: load what encodes them, and refuse the features that do not support them yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.media import MediaInput, MediaSpan, Transcription, content_digest, with_surrogates
from tokenmill.core.messages import AddRequest
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.audio.spec import read_audio
from tokenmill.model.audio.transcription import read_transcription
from tokenmill.model.sharding.shard import stage_layers
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.loading import LoadedModel
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.assembly.warm_up import GREEDY, run_alone
from tokenmill.startup.sizing.state_size import BYTES_OF
from tokenmill.startup.sizing.tower_size import TowerMemory, reserved_bytes, reserved_for_sound

if TYPE_CHECKING:
    from tokenmill.engine.loop.step_log import LogHeader
    from tokenmill.engine.runner.executor import Executor
    from tokenmill.model.attention.media_rows import Encoder
    from tokenmill.model.attention.media_store import MediaStore


# Rows and columns of tokens: kernels are compiled for counts of patches that sixteen divides, and for others.
SMALLEST_IMAGES = ((1, 1), (4, 4))


class Media(Capability):
    """The two ends of a modality in an engine: the contents that requests bring, and their `encoder`."""

    def __init__(self, config: EngineConfig, contents: MediaStore, encoder: Encoder, memory: TowerMemory) -> None:
        self.reserved_bytes = memory.reserved
        self.encoder = encoder
        self._config = config
        self._contents = contents
        self._memory = memory

    def gates(self) -> tuple[MediaStore]:
        """Return the store of contents, which lets every request through."""
        return (self._contents,)

    def row_extensions(self, memory: StepMemory) -> tuple[Encoder]:
        """Return the encoder."""
        return (self.encoder,)

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Let steps encode; a scheduler of text alone asks no encoder about each token."""
        budget, capacity = self._config.encoder_budget, self._config.encoder_cache_tokens
        header.scheduler = msgspec.structs.replace(
            header.scheduler, encoder_budget=budget, encoder_cache_tokens=capacity
        )
        return header

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell what the tower weighs."""
        ready.weight_bytes += self._memory.weights


class Images(Media):
    """Prompts with images."""

    _sees_ahead = False
    _spec: VisionSpec | None = None
    _limits: ModelLimits | None = None

    @classmethod
    def check(cls, config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
        """Refuse features that models with images or sound do not support yet."""
        check_media(config, architecture, platform)
        check_clips(config, architecture, platform)

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Load the vision tower of a model that takes images.

        Raises:
            InvalidCheckpoint: the tower is broken or not supported.
        """
        if not assembly.model.architecture.takes_images:
            return None
        with assembly.timer.phase("loading the vision tower"):
            return cls._load(assembly.config, assembly.model, assembly.platform, assembly.limits)

    @classmethod
    def _load(cls, config: EngineConfig, model: LoadedModel, platform: Platform, limits: ModelLimits) -> Self | None:
        spec = read_vision(model.folder)
        if spec is None:
            return None
        num_first = len(stage_layers(model.architecture, config.pipeline_parallel_size)[0])
        if len(spec.deepstack) >= num_first and config.pipeline_parallel_size > 1:
            raise InvalidConfig(
                f"--pipeline-parallel-size: {len(spec.deepstack)} layers add to an image's tokens, and the first stage "
                f"has {num_first} layers: have fewer stages"
            )
        # Towers run on torch, which models of text do without.
        from tokenmill.model.attention.media_rows import Encoder
        from tokenmill.model.attention.media_store import MediaStore
        from tokenmill.model.attention.media_turns import MediaTurns
        from tokenmill.model.vision.tower import load_tower

        platform.set_num_threads(model.num_threads)
        tower = load_tower(model.folder, spec, model.kernels)
        rotary, *_ = model.decoder.rotary.values()
        turns = MediaTurns(sections=spec.sections, is_interleaved=spec.is_interleaved, merge=spec.merge)
        contents = MediaStore(turns, len(rotary.cos))
        sees_ahead = model.architecture.spans_see_ahead
        parts = tower.encode_input, turns, contents, rotary, config.max_num_seqs
        encoder = Encoder(*parts, spans_see_ahead=sees_ahead, stand_in=spec.stand_in_id)
        reserved = reserved_bytes(config, spec, BYTES_OF[config.dtype])
        images = cls(config, contents, encoder, TowerMemory(tower.num_bytes, reserved))
        images._sees_ahead, images._spec = sees_ahead, spec
        images._limits = limits if platform.is_accelerator else None
        return images

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Let steps encode; no step ends within an image whose tokens see each other. Warm an accelerator up."""
        header = super().settle(header, memory, executor)
        if self._sees_ahead:
            header.scheduler = msgspec.structs.replace(header.scheduler, disable_chunked_mm_input=True)
        if self._limits is not None:
            limits = msgspec.structs.replace(self._limits, max_model_len=memory.size.max_model_len)
            self._warm_up(Engine(header.make_scheduler(), executor, limits))
        return header

    def _warm_up(self, engine: Engine) -> None:
        """Run a prompt with images, whose kernels would else be compiled while others wait."""
        from tokenmill.model.attention.media_rows import NoSource

        assert self._spec is not None, "an engine with images has their shapes"
        message = prompt_with_images(self._spec, SMALLEST_IMAGES)
        budgets = (
            self._config.encoder_budget,
            self._config.encoder_cache_tokens,
            engine.scheduler.config.max_num_batched_tokens,
        )
        if len(message.prompt_token_ids) + (GREEDY.max_tokens or 0) > min(*budgets, engine.limits.max_model_len):
            return
        source, self.encoder.source = self.encoder.source, NoSource()
        try:
            self._contents.admit(message)
            run_alone(engine, message)
        finally:
            self._contents.release(message.id)
            self.encoder.source = source
            self.encoder.forget()

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell that prompts may have images, and what the tower weighs."""
        super().describe(ready, memory)
        ready.takes_images = True


class Sound(Media):
    """Prompts with sound; `Images` refuses what neither supports."""

    _max_seconds = 0.0
    _transcription: Transcription | None = None

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Load the encoder of a model that takes sound.

        Raises:
            InvalidCheckpoint: the encoder is broken or not supported.
        """
        model, config = assembly.model, assembly.config
        spec = read_audio(model.folder) if model.architecture.takes_sound else None
        if spec is None:
            return None
        # Encoders run on torch, which models of text do without.
        from tokenmill.model.attention.media_rows import Encoder
        from tokenmill.model.attention.media_store import MediaStore
        from tokenmill.model.attention.media_turns import MediaTurns
        from tokenmill.model.audio.encoder import load_encoder

        with assembly.timer.phase("loading the encoder of sound"):
            assembly.platform.set_num_threads(model.num_threads)
            contents, tower = MediaStore(), load_encoder(model.folder, spec, model.kernels)
        rotary = next(iter(model.decoder.rotary.values()), None)
        encoder = Encoder(tower.encode_input, MediaTurns(), contents, rotary, config.max_num_seqs)
        reserved = reserved_for_sound(config, spec, BYTES_OF[config.dtype])
        sound = cls(config, contents, encoder, TowerMemory(tower.num_bytes, reserved))
        sound._max_seconds, sound._transcription = spec.max_seconds, read_transcription(model.folder, spec)
        return sound

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell how long a clip may be, how to ask for its words, and what the encoder weighs."""
        super().describe(ready, memory)
        ready.max_clip_seconds, ready.transcription = self._max_seconds, self._transcription


def prompt_with_images(spec: VisionSpec, sizes: Sequence[tuple[int, int]]) -> AddRequest:
    """Return a request whose prompt has black images; `sizes`: of each, rows and columns of tokens."""
    ids, media = [0], []
    for rows, columns in sizes:
        height, width = rows * spec.factor, columns * spec.factor
        pixels = bytes(3 * height * width)
        digest = content_digest(pixels, height, width, "")
        patches = rows * spec.merge, columns * spec.merge
        media.append(MediaInput(MediaSpan(len(ids), rows * columns, digest, *patches, spec.image_token_id), pixels))
        ids += [*[spec.image_token_id] * (rows * columns), 0]
    return AddRequest(id="images", prompt_token_ids=with_surrogates(ids, media), params=GREEDY, media=media)


def check_media(config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
    """Refuse features that models with images or sound do not support yet.

    Raises:
        InvalidConfig: the config asks for such a feature.
    """
    if not (architecture.takes_images or architecture.takes_sound):
        return
    refused = {
        "--context-parallel-size": config.context_parallel_size > 1,
        "ranks on GPUs": config.num_ranks > 1 and platform.is_accelerator,
        "--enable-lora": config.enable_lora,
        "--lora-merge": config.lora_merge is not None,
        "--speculative-config": config.speculative_config is not None,
        "--kv-host-size": config.kv_host_size is not None,
        f"--quantization {config.quantization}": config.quantization not in ("none", "int8", "int4"),
        "--load-format dummy": config.load_format == "dummy",
    }
    what = "images" if architecture.takes_images else "sound"
    for flag, is_given in refused.items():
        if is_given:
            raise InvalidConfig(
                f"{flag}: {architecture.name} takes {what}, and models that do cannot have it yet; "
                "--language-model-only leaves out what takes them"
            )
    if min(config.encoder_budget, config.encoder_cache_tokens) < 1:
        raise InvalidConfig("--encoder-budget and --encoder-cache-tokens must be at least 1")


def check_clips(config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
    """Refuse what a model does not support yet whose layers attend to clips.

    Raises:
        InvalidConfig: the config asks for such a feature.
    """
    length = architecture.clip_length
    if not length:
        return
    if config.language_model_only:
        raise InvalidConfig(f"--language-model-only: {architecture.name} writes down sound, and has no use without it")
    if config.num_ranks > 1:
        raise InvalidConfig(f"{architecture.name} runs in one process: layers that attend to clips are not divided yet")
    if platform.is_accelerator:
        raise InvalidConfig(
            f"{architecture.name} runs on CPUs: attention to clips has no kernels for GPUs yet (--device cpu)"
        )
    if config.max_model_len is not None and config.max_model_len <= length:
        raise InvalidConfig(
            f"--max-model-len {config.max_model_len}: a clip takes {length} tokens of the context, "
            f"and its text at most {architecture.max_position - length}"
        )
