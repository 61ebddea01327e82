"""Compute the bytes that a vision tower or an encoder of sound takes, from its config alone."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.model.audio.shapes import encoder_shapes
from tokenmill.model.audio.spec import AudioSpec, read_audio
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.vision.tower_shapes import tower_shapes


class TowerMemory(msgspec.Struct, frozen=True):
    """Bytes that a tower takes besides the decoder; 0 if the model takes text only.

    Attributes:
        weights: of the tower.
        reserved: for the outputs that are kept, and for encoding as many tokens as a step may.
        noun: what it is. users: the only contents that need it.
    """

    weights: int = 0
    reserved: int = 0
    noun: str = "a vision tower"
    users: str = "images"


def tower_memory(config: EngineConfig, folder: Path, item_bytes: int) -> TowerMemory:
    """Return the memory that the tower of a checkpoint will take, from its config alone.

    Args:
        item_bytes: of a weight; a tower keeps the model's dtype, however the decoder is quantized.

    Raises:
        InvalidCheckpoint: the tower is not supported.
    """
    if config.language_model_only:
        return TowerMemory()
    spec = read_vision(folder)
    if spec is None:
        return _sound_memory(config, folder, item_bytes)
    num_weights = sum(map(math.prod, tower_shapes(spec).values()))
    return TowerMemory(item_bytes * num_weights, reserved_bytes(config, spec, item_bytes))


def _sound_memory(config: EngineConfig, folder: Path, item_bytes: int) -> TowerMemory:
    spec = read_audio(folder)
    if spec is None:
        return TowerMemory()
    num_weights, reserved = sum(map(math.prod, encoder_shapes(spec).values())), reserved_for_sound
    return TowerMemory(
        item_bytes * num_weights, reserved(config, spec, item_bytes), "an encoder of sound", "clips of sound"
    )


def reserved_bytes(config: EngineConfig, spec: VisionSpec, item_bytes: int) -> int:
    """Return the bytes of the outputs that are kept and of encoding one whole budget.

    Args:
        item_bytes: of one number.
    """
    kept = config.encoder_cache_tokens * (1 + len(spec.deepstack)) * spec.out_size
    # Images are encoded one after the other, and where all are of one size, none takes the whole budget.
    tokens = min(config.encoder_budget, (spec.side // spec.factor) ** 2 or config.encoder_budget)
    # Of a patch: itself, its norm, q, k and v, what it attends to; and the middle of a block, as it is and with GELU.
    working = tokens * spec.merge**2 * (6 * spec.hidden_size + 2 * spec.intermediate_size)
    return item_bytes * (kept + working)


def reserved_for_sound(config: EngineConfig, spec: AudioSpec, item_bytes: int) -> int:
    """Return the bytes of the outputs that are kept and of encoding one clip: clips are encoded one after the other."""
    kept = config.encoder_cache_tokens * spec.out_size
    # As of a patch; and before the layers the spectrogram, and what the first convolution makes of it.
    working = spec.max_positions * (6 * spec.hidden_size + 2 * spec.intermediate_size)
    before = 2 * spec.max_positions * (2 * spec.hidden_size + spec.num_bins)
    return item_bytes * (kept + max(working, before))
