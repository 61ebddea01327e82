"""Load the encoder of a model without its decoder: for a process that encodes for serving engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.media import MediaInput
from tokenmill.demo import demo_model_path
from tokenmill.engine.transfer.output_files import output_name
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.audio.spec import read_audio
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.hub import fetch
from tokenmill.platform.select import select_platform
from tokenmill.startup.assembly.encoder_outputs import encoder_name
from tokenmill.startup.machine.device import ONE_THREAD_BYTES, check, choose_kernels, choose_threads
from tokenmill.startup.machine.torch_needs import check_torch

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.model.attention.media_rows import Encode
    from tokenmill.model.kernels.protocol import Kernels


def load_encoder_alone(config: EngineConfig) -> tuple[Callable[[MediaInput], bytes], str]:
    """Return the function from a content to its packed output, and a clause that says what it is.

    Raises:
        InvalidConfig: the model takes text only, or cannot run here.
        InvalidCheckpoint: there is no such model, or its encoder is broken.
    """
    platform = select_platform(config.device)
    model = config.model or str(demo_model_path())
    config = dataclasses.replace(config, model=model, device=platform.device, quantization="none").resolve()
    folder = fetch(config.model, config.revision, config.download_dir, lambda done, total: None)
    architecture = read_architecture(folder)
    check_encoder_alone(config, architecture)
    check_torch(config, architecture, platform)
    check(config, platform)
    num_threads, _ = choose_threads(config, platform, ONE_THREAD_BYTES)
    kernels, _ = choose_kernels(config, platform, folder, num_threads)
    platform.set_num_threads(num_threads)  # the kernels may have brought torch
    encode, whose = _tower(folder, kernels), encoder_name(config, folder, kernels)
    from tokenmill.engine.transfer.encoder_outputs import packed_output

    def pack(one: MediaInput) -> bytes:
        if not 0 < one.span.length <= config.encoder_budget:
            raise InvalidRequest(f"{one.span.length} tokens; an encoder takes 1 to {config.encoder_budget}", "span")
        try:
            output = encode(one)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequest(f"the content is not what its span says: {error}", "content") from error
        if len(output) != one.span.length:
            raise InvalidRequest(f"the content has {len(output)} tokens, its span {one.span.length}", "span")
        return packed_output(output_name(whose, one.span.digest), output)

    what = "images" if architecture.takes_images else "sound"
    return pack, f"encodes {what} for {config.model} in {config.dtype} ({kernels.name} kernels)"


def check_encoder_alone(config: EngineConfig, architecture: Architecture) -> None:
    """Refuse a model without an encoder, and flags that an encoder server has no use for.

    Raises:
        InvalidConfig: names the model or the flag.
    """
    if not (architecture.takes_images or architecture.takes_sound):
        raise InvalidConfig(f"--encoder-only: {architecture.name} takes neither images nor sound")
    if config.language_model_only:
        raise InvalidConfig("--encoder-only loads what --language-model-only leaves out: give one of them")
    if config.encoder_outputs() is not None:
        raise InvalidConfig("--encoder-only keeps no outputs: give the folder and the addresses to those who serve")


def _tower(folder: Path, kernels: Kernels) -> Encode:
    """Load what encodes: a vision tower, or an encoder of sound."""
    vision = read_vision(folder)
    if vision is not None:
        from tokenmill.model.vision.tower import load_tower

        return load_tower(folder, vision, kernels).encode_input
    from tokenmill.model.audio.encoder import load_encoder

    sound = read_audio(folder)
    assert sound is not None, "the architecture takes images or sound"
    return load_encoder(folder, sound, kernels).encode_input
