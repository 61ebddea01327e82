"""Choose the bits of int4's matrices at a start: once for a model and a budget, for the choice is kept in the cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.regular_file import open_regular
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.quantization.packed import PackedFormat, PackedFormats
from tokenmill.model.weights.cache_folder import own_folder
from tokenmill.model.weights.loader import ModelPlan, plan_model
from tokenmill.model.weights.mixture import BITS, can_mix, measured_formats
from tokenmill.model.weights.sharing import content_of

logger = logging.getLogger(__name__)

SUFFIX = ".bits"


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chosen formats as they are kept.

    Attributes:
        layers: of each layer those of attention, first and second matrix of the feed-forward block.
    """

    vocabulary: PackedFormat
    layers: list[tuple[PackedFormat, PackedFormat, PackedFormat]]

    @classmethod
    def of(cls, formats: PackedFormats) -> Choice:
        """Return the choice that formats stand for."""
        layers = [(one.layers, one.gate_up or one.layers, one.down or one.layers) for one in formats.by_layer]
        return cls(formats.vocabulary, layers)

    @property
    def formats(self) -> PackedFormats:
        """The formats of a model's matrices."""
        by_layer = [
            PackedFormats(own, self.vocabulary, gate_up=gate_up, down=down) for own, gate_up, down in self.layers
        ]
        return PackedFormats(PackedFormat.INT4, self.vocabulary, by_layer=tuple(by_layer))

    def fits(self, num_layers: int) -> bool:
        """Return True if it can be of a model with so many layers."""
        return len(self.layers) == num_layers and all(format in BITS for layer in self.layers for format in layer)


def with_measured_bits(
    plan: ModelPlan, folder: Path, config: EngineConfig, progress: Callable[[int, int], None]
) -> ModelPlan:
    """Return the plan with the formats that lose least within the budget of int4; the same plan where none is measured.

    All ranks measure the whole model, and choose the same.

    Args:
        progress: called with (bytes done, bytes in all) while weights are tried.
    """
    kernels, architecture = plan.kernels, plan.shapes.architecture
    if plan.importance is None or not isinstance(kernels, NativeKernels) or not can_mix(architecture):
        return plan
    path = _path(plan, folder, config)
    choice = None if path is None else _kept(path)
    if choice is None or not choice.fits(len(architecture.layers)):
        whole = plan_model(folder, architecture, kernels, config.load_format, is_again=True)
        importance = plan.importance.measure()
        formats = measured_formats(whole, kernels, importance, config.quantization_bits, progress)
        choice = Choice.of(formats)
        if path is not None:
            _keep(path, choice)
    chosen, collective = kernels.with_formats(choice.formats), plan.shapes.collective
    return plan_model(folder, architecture, chosen, config.load_format, collective, is_again=True)


def _path(plan: ModelPlan, folder: Path, config: EngineConfig) -> Path | None:
    """Return the file of the choice; None: it is not kept."""
    if not config.weight_cache:
        return None
    try:
        cache = own_folder(config.weight_cache_folder)
    except OSError as error:
        logger.warning("the choice of bits is not kept in %s: %s", error.filename, error.strerror)
        return None
    return cache / f"{content_of(plan, folder).key}-{config.quantization_bits:g}{SUFFIX}"


def _kept(path: Path) -> Choice | None:
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(), type=Choice)
    except (OSError, ValueError, InvalidCheckpoint):
        return None


def _keep(path: Path, choice: Choice) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_bytes(msgspec.json.encode(choice))
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        logger.warning("the choice of bits is not kept in %s: %s", path, error.strerror)
