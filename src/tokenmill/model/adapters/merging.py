"""Fold an adapter into the weights while they are read: W + scale * B A, before they are brought to their form.

A model served with one adapter only is then as fast as without it, on any device. Knows no torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidConfig
from tokenmill.model.adapters.places import OUTSIDE, all_places, check_adaptable
from tokenmill.model.adapters.reading import ReadModule, read_adapter
from tokenmill.model.models.targets import Target
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.packed import Rows, dense
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.weights.loader import ModelPlan, WeightRead

# Rows at a time, whose sums are of float64: so they hardly depend on the order in which a library adds.
_ROWS = 256


class MergedRead(msgspec.Struct, frozen=True):
    """A `WeightRead` that adds a module of an adapter to the values of another one, rounded once, to float32.

    Attributes:
        target: the values to read.
    """

    read: WeightRead
    module: ReadModule
    target: Target

    @property
    def key(self) -> WeightKey:
        """Key of the target."""
        return self.read.key

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        return self.read.num_bytes

    @property
    def spare_bytes(self) -> int:
        """Memory that `rows` takes for a moment: the weight and the product are there at once."""
        return self.read.spare_bytes + 2 * 4 * self.target.part.count * self.module.place.in_size

    def rows(self) -> Rows:
        """Return the merged values. Integers become floats: the kernels' form rounds them anew."""
        rows, columns = self.target.part, self.target.columns
        a = self.module.a if columns is None else self.module.a[:, columns.start : columns.stop]
        b, wide = self.module.b[rows.start : rows.stop].float32(), a.float32().astype(np.float64)
        merged = dense(self.read.rows()).float32().copy()
        for start in range(0, len(merged), _ROWS):
            own = slice(start, start + _ROWS)
            merged[own] += b[own].astype(np.float64) @ wide * self.module.scale
        return StoredArray(merged, "F32")


def merged(plan: ModelPlan, folder: Path, max_rank: int) -> ModelPlan:
    """Return the plan of a model that has an adapter in its weights.

    Raises:
        InvalidCheckpoint: the adapter cannot be read, or is not of this model.
        InvalidConfig: the weights are random.
    """
    if plan.reads is None:
        raise InvalidConfig("--lora-merge needs the weights of a model: leave out --load-format dummy")
    check_adaptable(plan.shapes.architecture)
    adapter = read_adapter(folder, all_places(plan.shapes, plan.kernels), max_rank)
    for module in adapter.modules:
        if module.place.matrix[0] == OUTSIDE:
            raise InvalidConfig(
                f"--lora-merge: an adapter of {module.place.module} is not merged, only those of layers"
            )
    modules = {f"{module.place.module}.weight": module for module in adapter.modules}
    targets = {target.key: target for target in plan.shapes.targets()}
    reads = [
        MergedRead(read, modules[name], targets[read.key]) if (name := targets[read.key].name) in modules else read
        for read in plan.reads
    ]
    spare = max([plan.spare_bytes, *(read.spare_bytes for read in reads)])
    return msgspec.structs.replace(plan, reads=reads, spare_bytes=spare, merged=adapter.digest)
