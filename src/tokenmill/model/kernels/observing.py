"""Native kernels that note how large the inputs of their matrices are, while a model runs a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill.model.kernels.experts import LoopedExperts
from tokenmill.model.kernels.native_kernels import NativeExperts, NativeKernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import NO_PARTS, ExpertBiases, Experts, Gate, LinearWeight, Parts, WeightRole
from tokenmill.model.quantization.packed import PackedFormat, PackedFormats
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    import torch

    from tokenmill import _native


class ObservedWeight(PackedWeight):
    """A `PackedWeight` that adds up the squares of its inputs; a native pass to which it is bound does so too.

    Args:
        most: rows of x that a native pass keeps.

    Attributes:
        squares: [in_size], the sum over the rows of x so far of x squared.
    """

    def __init__(self, *args: Any, most: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.squares: npt.NDArray[np.float64] = np.zeros(self.shape[1])
        self._num_rows = np.zeros(1, np.int64)
        self._first = np.zeros((most, self.shape[1]), np.uint16)

    @property
    def num_rows(self) -> int:
        """Rows of x so far."""
        return int(self._num_rows[0])

    @property
    def notes(self) -> tuple[int, int]:
        """Addresses of the squares and of the number of rows."""
        return address(self.squares), address(self._num_rows)

    @property
    def kept(self) -> tuple[int, int]:
        """Address of the first rows, and how many there is room for."""
        return address(self._first), len(self._first)

    @property
    def first(self) -> npt.NDArray[np.uint16]:
        """The first rows of x that a native pass saw, in bfloat16."""
        return self._first[: self.num_rows]

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Note x, and multiply."""
        self._note(x)
        return super().multiply(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """Note x, and multiply."""
        self._note(x)
        return super().gated(x, bias, gate)

    def _note(self, x: torch.Tensor) -> None:
        import torch

        room = self._first[self.num_rows :]
        room[: len(x)] = x[: len(room)].contiguous().view(torch.uint16).numpy()
        self._num_rows += len(x)
        self.squares += x.double().square_().sum(0).numpy()


class ObservedExperts(NativeExperts):
    """`NativeExperts` whose matrices note their inputs."""

    __slots__ = ()

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, whose matrices are called one by one."""
        return LoopedExperts.mix(self, x, weights, experts)

    def bind(self) -> _native.Experts:
        """Return the experts in native form, which notes the inputs too."""
        bound = super().bind()
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            assert isinstance(gate_up, ObservedWeight) and isinstance(down, ObservedWeight), "all are observed"
            bound.observe(number, *gate_up.notes, *down.notes)
        return bound


class ObservingKernels(NativeKernels):
    """`NativeKernels` in int8 whose matrices are `ObservedWeight`s. `most`: rows of inputs that these keep."""

    def __init__(self, kernels: NativeKernels, most: int) -> None:
        self._most = most
        super().__init__(kernels.native, PackedFormats(PackedFormat.INT8, PackedFormat.INT8))

    def of_layer(self, index: int) -> ObservingKernels:
        """Return these kernels."""
        return self

    def linear_weight(
        self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR, parts: Parts = NO_PARTS
    ) -> LinearWeight:
        """Make an unfilled matrix."""
        return ObservedWeight(self.native, (out_size, in_size), role, self._format(role), most=self._most)

    def _expert_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        return ObservedWeight(self.native, (out_size, in_size), role, self.formats.layers)

    def _mixture(
        self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], gate: Gate, biases: ExpertBiases | None
    ) -> Experts:
        return ObservedExperts(self.native, gate_up, down, gate, biases)
