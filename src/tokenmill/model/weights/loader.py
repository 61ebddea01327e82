"""Stream a checkpoint into a decoder, weight by weight, so that the peak of memory is close to the model's size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.kernels.measuring import MeasuringKernels
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.error_costs import ErrorCosts
from tokenmill.model.quantization.packed import (
    QUANTIZATIONS,
    UNQUANTIZED,
    PackedFormats,
    Rows,
    WeightedRows,
)
from tokenmill.model.quantization.stored_array import StoredArray, seeded_normal
from tokenmill.model.sharding.collective import ALONE, Collective
from tokenmill.model.weights.checkpoint import open_checkpoint, stored_scheme
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.folder import LINK_NAME
from tokenmill.model.weights.gguf.reads import plan_gguf_reads
from tokenmill.model.weights.gguf.values import packed_formats
from tokenmill.model.weights.leftovers import warn_of_leftovers
from tokenmill.model.weights.reads import plan_reads
from tokenmill.platform.memory import Arena

Progress = Callable[[int, int], None]

DUMMY_SEED = 0
# Arrays of float32 of the size of a rotary table that exist while the two are made.
ROTARY_TEMPORARIES = 4
FLOAT32_BYTES = 4


class WeightRead(Protocol):
    """One weight to be read: the key of its target, its bytes in the files, and its values."""

    @property
    def key(self) -> WeightKey:
        """Key of the target."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""

    @property
    def spare_bytes(self) -> int:
        """Memory that `rows` takes for a moment."""

    def rows(self) -> Rows:
        """Return the values, floats or quantized."""


class Importance(Protocol):
    """Measures, before weights are rounded, what errors in their numbers cost."""

    @property
    def digest(self) -> str:
        """Name of all that the result depends on besides the model."""

    def measure(self) -> Mapping[WeightKey, ErrorCosts]:
        """Return the costs of each matrix that it knows of."""


class ModelPlan(msgspec.Struct, frozen=True):
    """A model that can be loaded: the checked reads of every weight, and the memory that it takes.

    Attributes:
        shapes: the decoder without values.
        weight_bytes: memory of all that the loaded decoder holds.
        sizes: bytes of each weight and vector in the kernels' form, in the order in which a decoder makes them.
        spare_bytes: memory taken on top of it for a moment, while it is loaded.
        merged: digest of an adapter that is folded into the weights; "": none is.
        importance: of the inputs of matrices; None: all weigh the same.
    """

    shapes: Decoder
    kernels: Kernels
    reads: Sequence[WeightRead] | None
    weight_bytes: int
    sizes: Sequence[int]
    spare_bytes: int
    merged: str = ""
    importance: Importance | None = None

    def load(self, progress: Progress | None = None, arena: Arena | None = None) -> Decoder:
        """Return a decoder with the weights.

        Args:
            progress: called with (bytes done, bytes in all) of the checkpoint, once before and after each weight.
            arena: zeroed memory for the weights, of kernels that share memory; None: they take their own.
        """
        report = progress or (lambda done, total: None)
        decoder = self._decoder(self.kernels) if arena is None else self.place(arena)
        if self.reads is None:
            return _dummy(decoder, self.kernels, report)
        _fill(decoder, self.reads, report, {} if self.importance is None else self.importance.measure())
        return decoder

    def place(self, arena: Arena) -> Decoder:
        """Return a decoder whose weights lie in an arena."""
        kernels = self.kernels.in_memory(arena)
        assert kernels is not None, "kernels that share memory"
        decoder = self._decoder(kernels)
        mapped = {target.key for target in decoder.targets() if target.is_mapped}
        _fill(decoder, [read for read in self.reads or () if read.key in mapped], lambda done, total: None, {})
        return decoder

    def _decoder(self, kernels: Kernels) -> Decoder:
        return make_decoder(self.shapes.architecture, kernels, self.shapes.collective)


def choose_formats(folder: Path, quantization: str | None) -> PackedFormats:
    """Return the formats of a model's matrices: as the checkpoint is stored, or as `--quantization` asks for.

    Raises:
        InvalidCheckpoint: the folder's config.json or GGUF file cannot be read.
        InvalidConfig: the checkpoint is quantized, and something else is asked for.
    """
    stored = packed_formats(open_gguf(folder / LINK_NAME)) if _is_gguf(folder) else stored_scheme(folder).formats
    if quantization is None:
        return stored
    if stored != UNQUANTIZED:
        raise InvalidConfig(f"--quantization {quantization}: {folder} is quantized already; leave the flag out")
    return QUANTIZATIONS[quantization]


def check_stored(folder: Path, wanted: str) -> None:
    """Check that a folder's weights are stored in a format that the user has named.

    Raises:
        InvalidCheckpoint: the folder's config.json cannot be read.
        InvalidConfig: they are stored in another.
    """
    stored = "gguf" if _is_gguf(folder) else stored_scheme(folder).method
    if stored != wanted:
        kept = "as floats" if stored == "none" else f"as {stored}"
        raise InvalidConfig(f"--quantization {wanted}: {folder} is stored {kept}; leave the flag out")


def _is_gguf(folder: Path) -> bool:
    return (folder / LINK_NAME).exists()


def plan_model(
    folder: Path,
    architecture: Architecture,
    kernels: Kernels,
    load_format: str = "auto",
    collective: Collective = ALONE,
    is_again: bool = False,
) -> ModelPlan:
    """Decide how a folder becomes a decoder in the form of the kernels; only headers of files are read.

    Args:
        collective: of the rank that runs it, which reads its part and no more.
        load_format: `auto`, `safetensors` or `gguf`: read the folder; `dummy`: seeded random weights, no weight file
            needed.
        is_again: the same load has planned the folder before, and warned of what is left over.

    Raises:
        InvalidCheckpoint: anything missing, truncated, misshapen or surplus.
    """
    measuring = MeasuringKernels(kernels)
    shapes = make_decoder(architecture, measuring, collective)
    weight_bytes = _num_bytes(shapes, measuring)
    reads = None if load_format == "dummy" else _plan(folder, load_format, shapes, is_again)
    unpacking = max((read.spare_bytes for read in reads or ()), default=0)
    # Made before any weight is filled.
    numbers = max((math.prod(tables.cos.shape) for tables in shapes.rotary.values()), default=0)
    tables = ROTARY_TEMPORARIES * numbers * FLOAT32_BYTES
    spare_bytes = max(unpacking, tables - weight_bytes)
    return ModelPlan(shapes, kernels, reads, weight_bytes, measuring.sizes, spare_bytes)


def make_decoder(architecture: Architecture, kernels: Kernels, collective: Collective = ALONE) -> Decoder:
    """Return a decoder without values, of the class that runs the architecture."""
    if not architecture.clip_length:
        return Decoder(architecture, kernels, collective)
    # Imported here: it runs in torch, which other decoders do without.
    from tokenmill.model.models.cross_decoder import CrossDecoder

    return CrossDecoder(architecture, kernels, collective)


def measure(architecture: Architecture, kernels: Kernels) -> tuple[Decoder, int]:
    """Return a decoder without values, and the bytes of memory that one with values takes."""
    measuring = MeasuringKernels(kernels)
    shapes = make_decoder(architecture, measuring)
    return shapes, _num_bytes(shapes, measuring)


def _num_bytes(shapes: Decoder, measuring: MeasuringKernels) -> int:
    return measuring.num_bytes + sum(tables.num_bytes for tables in shapes.rotary.values())


def load_model(
    folder: Path,
    architecture: Architecture,
    kernels: Kernels,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> Decoder:
    """Return a decoder with the weights of a folder; see `plan_model` and `ModelPlan.load`."""
    return plan_model(folder, architecture, kernels, load_format).load(progress)


def _plan(folder: Path, load_format: str, shapes: Decoder, is_again: bool) -> Sequence[WeightRead]:
    architecture = shapes.architecture
    is_gguf = (folder / LINK_NAME).exists()
    if load_format not in ("auto", "gguf" if is_gguf else "safetensors"):
        raise InvalidCheckpoint(f"{folder} has no {load_format} weights, which --load-format asks for")
    if is_gguf:
        return plan_gguf_reads(open_gguf(folder / LINK_NAME), shapes.targets(), architecture)
    checkpoint, shard = open_checkpoint(folder).named_for(architecture), shapes.collective.shard
    reads = plan_reads(checkpoint, shapes.targets(), architecture)
    if shard.rank == 0 and shard.is_first_stage and not is_again:
        warn_of_leftovers(checkpoint, architecture)
    return reads


def _fill(
    decoder: Decoder,
    reads: Sequence[WeightRead],
    report: Progress,
    importance: Mapping[WeightKey, ErrorCosts],
) -> None:
    targets = {target.key: target for target in decoder.targets()}
    total, done = sum(read.num_bytes for read in reads), 0
    report(done, total)
    for read in reads:
        target, rows = targets[read.key], read.rows()
        if read.key in importance and isinstance(rows, StoredArray):
            costs, columns = importance[read.key], target.columns
            rows = WeightedRows(rows, costs if columns is None else costs.of_inputs(columns.start, columns.stop))
        target.fill(rows)
        done += read.num_bytes
        report(done, total)


def _dummy(decoder: Decoder, kernels: Kernels, report: Progress) -> Decoder:
    """Fill a weight with values of the scale that training would start from: activations neither vanish nor explode."""
    targets = list(decoder.targets())
    total, done = sum(math.prod(target.shape) for target in targets), 0
    for target in targets:
        report(done, total)
        # A rank draws what all have, so that its part is what it would be without the others.
        if target.is_mapped:
            # All rows are one: the table is larger than anything else, and is never in memory.
            row = seeded_normal(target.shape[1:], 1.0, DUMMY_SEED)
            target.fill(StoredArray(np.broadcast_to(row.values, target.shape), row.dtype))
        elif target.is_matrix:
            target.fill(target.wanted(kernels.normal(target.shape, target.shape[-1] ** -0.5, DUMMY_SEED + done)))
        else:
            value = 0.0 if target.name.endswith(".bias") else 1.0
            target.fill(target.wanted(StoredArray(np.full(target.shape, value, np.float32), "F32")))
        done += math.prod(target.shape)
    report(done, total)
    return decoder
