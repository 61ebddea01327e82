"""Choose the bits of each matrix: those that lose least, as measured on the weights, within a budget of bytes.

A group is the matrices that share a format: of one layer those of the attention, the first and the second of the
feed-forward block; and the vocabulary. The loss of a group in a format is the error of its outputs as a share of their
energy, times how much such a share changes a model's predictions. Bits go where a byte saves most, until none are left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import WeightRole
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.error_costs import EVEN, ErrorCosts
from tokenmill.model.quantization.packed import PackedFormat, PackedFormats, WeightedRows
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.weights.loader import ModelPlan
from tokenmill.platform.arrays import address

# Bits of a weight with its part of a scale.
BITS = {PackedFormat.INT4: 4.5, PackedFormat.INT4_OFFSET: 5.0, PackedFormat.INT5: 5.5, PackedFormat.INT8: 8.5}
# KL divergence from float32 where a group loses all of its outputs' energy, by field of `PackedFormats`, if it grew in
# proportion: measured on SmolLM2 with one kind of matrix at a time in few bits (docs/quantization.md).
SENSITIVITY = {"layers": 0.17, "gate_up": 0.40, "down": 0.26, "vocabulary": 38.0}
# An offset takes the mean of a group's errors away, and inputs are not independent: what is lost costs less.
OFFSET_SHARE = 0.65
# Shares of the outputs' energy that matrices lose where nothing is measured.
TYPICAL_ERRORS = {
    PackedFormat.INT4: 6e-3,
    PackedFormat.INT4_OFFSET: 4e-3,
    PackedFormat.INT5: 1.5e-3,
    PackedFormat.INT8: 3e-5,
}
# The field of `PackedFormats` that has a matrix's format.
FIELDS = {
    WeightRole.LINEAR: "layers",
    WeightRole.GATE_UP: "gate_up",
    WeightRole.DOWN: "down",
    WeightRole.EMBEDDING: "vocabulary",
    WeightRole.HEAD: "vocabulary",
}
# Of the rows of a matrix one in so many is tried in each format.
SAMPLED = 8
# Outputs of less energy count as if they had this.
SMALLEST = 1e-30
# The share of a budget by which sums may miss it.
ROUNDING = 1e-9


class Group(msgspec.Struct, frozen=True):
    """The matrices of a layer that have a format in common.

    Attributes:
        layer: None: outside of all layers.
        field: of `PackedFormats`.
    """

    layer: int | None
    field: str


Losses = Mapping[Group, Mapping[PackedFormat, float]]


def can_mix(architecture: Architecture) -> bool:
    """Return True for a model whose bits are chosen: not one of experts, recurrences, per-layer embeddings or clips."""
    is_dense = not any(isinstance(layer.mlp, MoeSpec) for layer in architecture.layers)
    is_plain = architecture.per_layer is None and not architecture.recurrences
    return is_dense and is_plain and not architecture.clip_length


def typical_formats(architecture: Architecture, kernels: NativeKernels, bits: float) -> PackedFormats:
    """Return formats within a budget for a model of which no weight has been read yet."""
    sizes = _sizes(Decoder(architecture, kernels.without_memory()), kernels)
    losses = {group: _losses(group, TYPICAL_ERRORS) for group in sizes}
    return choose(sizes, losses, bits)


def measured_formats(
    plan: ModelPlan,
    kernels: NativeKernels,
    importance: Mapping[WeightKey, ErrorCosts],
    bits: float,
    progress: Callable[[int, int], None],
) -> PackedFormats:
    """Return the formats within a budget that lose least.

    Args:
        plan: of the whole model.
        importance: of the inputs of matrices; see `InputImportance`.
        progress: called with (bytes done, bytes in all).
    """
    return choose(_sizes(plan.shapes, kernels), _measured_losses(plan, kernels, importance, progress), bits)


def choose(sizes: Mapping[Group, int], losses: Losses, bits: float) -> PackedFormats:
    """Return the formats of the groups.

    The vocabulary may be half of a model, so that its steps are large: each of its formats is tried, if it has room.

    Args:
        sizes: bytes in int8.
        bits: the budget, for each weight on the average.
    """
    vocabulary = Group(None, "vocabulary")
    budget = sum(sizes.values()) * bits / BITS[PackedFormat.INT8]
    tried = [_filled(sizes, losses, budget, {vocabulary: format}) for format in BITS]
    possible = [chosen for chosen in tried if chosen is not None]
    return _formats(min(possible, key=lambda chosen: sum(losses[group][format] for group, format in chosen.items())))


def _filled(
    sizes: Mapping[Group, int], losses: Losses, budget: float, fixed: Mapping[Group, PackedFormat]
) -> dict[Group, PackedFormat] | None:
    """Return formats of all groups: from the fewest bits on, the step whose bytes save most; None: no room for these.

    Args:
        budget: bytes.
    """
    most = BITS[PackedFormat.INT8]
    chosen = {group: fixed.get(group, PackedFormat.INT4) for group in sizes}
    left = budget - sum(size * BITS[chosen[group]] / most for group, size in sizes.items())
    if left < -ROUNDING * budget:
        return None

    def steps() -> Iterator[tuple[float, float, Group, PackedFormat]]:
        for group, now in chosen.items():
            for format, wanted in BITS.items():
                cost = sizes[group] * (wanted - BITS[now]) / most
                saved = losses[group][now] - losses[group][format]
                if group not in fixed and 0 < cost <= left and saved > 0:
                    yield saved / cost, cost, group, format

    while best := max(steps(), key=lambda step: step[0], default=None):
        _, cost, group, format = best
        chosen[group] = format
        left -= cost
    return chosen


def summary(formats: PackedFormats) -> str:
    """Return the number of groups in each format, for the start screen; "": no choice was made."""
    if formats.parts:
        return _stored_summary(formats)
    if not formats.by_layer:
        return ""
    counts = dict.fromkeys(BITS, 0)
    for layer in formats.by_layer:
        for format in (layer.layers, layer.gate_up, layer.down):
            counts[format or layer.layers] += 1
    spread = ", ".join(f"{count} of {BITS[format]:g}" for format, count in counts.items() if count)
    return f"bits a weight: vocabulary {BITS[formats.vocabulary]:g}, groups of the layers' matrices {spread}"


def _stored_summary(formats: PackedFormats) -> str:
    """Return the number of matrices in each format of a file that has them of several."""
    counts = Counter(format for layer in formats.by_layer for _, format in layer.parts)
    vocabulary = dict(formats.parts).get("head", formats.parts[0][1])
    spread = ", ".join(f"{count} of {_words(format)}" for format, count in counts.most_common())
    return f"formats: vocabulary {_words(vocabulary)}, the layers' matrices {spread}"


def _words(format: PackedFormat) -> str:
    return format.name.replace("INT", "int").replace("_OFFSET", " with offsets")


def _formats(chosen: Mapping[Group, PackedFormat]) -> PackedFormats:
    vocabulary = chosen[Group(None, "vocabulary")]
    count = 1 + max((group.layer for group in chosen if group.layer is not None), default=-1)
    by_layer = tuple(
        PackedFormats(
            chosen[Group(layer, "layers")],
            vocabulary,
            gate_up=chosen.get(Group(layer, "gate_up")),
            down=chosen.get(Group(layer, "down")),
        )
        for layer in range(count)
    )
    return PackedFormats(PackedFormat.INT4, vocabulary, by_layer=by_layer)


def _sizes(shapes: Decoder, kernels: NativeKernels) -> dict[Group, int]:
    """Return the bytes of all groups in int8."""
    sizes: dict[Group, int] = defaultdict(int)
    for group, matrix in {id(matrix): (group, matrix) for _, group, matrix in _matrices(shapes)}.values():
        sizes[group] += PackedWeight(kernels.native, matrix.shape, matrix.role, PackedFormat.INT8, False).num_bytes
    return dict(sizes)


def _matrices(shapes: Decoder) -> Iterator[tuple[WeightKey, Group, PackedWeight]]:
    for target in shapes.targets():
        matrix = target.matrix
        if isinstance(matrix, PackedWeight) and matrix.role in FIELDS:
            yield target.key, Group(target.key.layer, FIELDS[matrix.role]), matrix


class _Errors:
    """The energy of a matrix's outputs, and the parts of it that each format loses, summed over samples of its rows."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._native = kernels.native
        self._energy = 0.0
        self._lost = dict.fromkeys(BITS, 0.0)

    def add(self, rows: StoredArray, costs: ErrorCosts) -> None:
        """Try some rows in each format, without feedback, which makes up for the same part in all of them."""
        exact = rows.float32()
        weights = np.ones(rows.shape[1], np.float32) if costs.importance is None else costs.importance
        self._energy += _energy(exact, weights)
        for format in BITS:
            packed = PackedWeight(self._native, (rows.shape[0], rows.shape[1]), format=format)
            packed.load_rows(0, WeightedRows(rows, ErrorCosts(weights)))
            self._lost[format] += _energy(self._numbers(packed) - exact, weights)

    def _numbers(self, packed: PackedWeight) -> npt.NDArray[np.float32]:
        ids, bits = np.arange(packed.shape[0]), np.empty(packed.shape, np.uint16)
        self._native.lookup(packed.packed, address(ids), len(ids), address(bits))
        return StoredArray(bits, "BF16").float32()

    def shares(self) -> Mapping[PackedFormat, float]:
        """Return the lost shares of the energy."""
        return {format: lost / max(self._energy, SMALLEST) for format, lost in self._lost.items()}


def _energy(numbers: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]) -> float:
    return float(np.square(numbers).sum(0, dtype=np.float64) @ weights)


def _measured_losses(
    plan: ModelPlan,
    kernels: NativeKernels,
    importance: Mapping[WeightKey, ErrorCosts],
    progress: Callable[[int, int], None],
) -> Losses:
    places = {key: (group, matrix) for key, group, matrix in _matrices(plan.shapes)}
    errors = {id(matrix): (group, _Errors(kernels)) for group, matrix in places.values()}
    reads = [read for read in plan.reads or () if read.key in places]
    total, done = sum(read.num_bytes for read in reads), 0
    for read in reads:
        progress(done, total)
        rows = read.rows()
        assert isinstance(rows, StoredArray), "weights that are chosen for are floats"
        weights = importance.get(read.key, EVEN)
        errors[id(places[read.key][1])][1].add(rows[::SAMPLED], weights)
        done += read.num_bytes
    progress(total, total)
    losses: dict[Group, dict[PackedFormat, float]] = {}
    for group, found in errors.values():
        own = losses.setdefault(group, dict.fromkeys(BITS, 0.0))
        for format, loss in _losses(group, found.shares()).items():
            own[format] += loss
    return losses


def _losses(group: Group, shares: Mapping[PackedFormat, float]) -> Mapping[PackedFormat, float]:
    """Return the divergence for the lost shares of the energy of a matrix's outputs."""
    weight = SENSITIVITY[group.field]
    return {
        format: weight * share * (OFFSET_SHARE if format is PackedFormat.INT4_OFFSET else 1)
        for format, share in shares.items()
    }
