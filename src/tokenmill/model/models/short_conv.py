"""The gated short convolution that LFM2 has in most of its layers instead of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.model.architecture.recurrence_spec import ShortConvSpec
from tokenmill.model.kernels.operands import empty_like
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch

    from tokenmill.model.kernels.states import StateRows, StepStates


class ShortConv:
    """A block with three projections b, c and x of a token: c times the convolution of b times x.

    Args:
        place: index of its states among those of the model.

    Attributes:
        weight: [size, kernel]. bias: [size]; None: absent.
    """

    __slots__ = ("_kernels", "bias", "inputs", "output", "place", "spec", "weight")

    def __init__(self, spec: ShortConvSpec, place: int, hidden_size: int, kernels: Kernels) -> None:
        self.spec, self.place, self._kernels = spec, place, kernels
        self.inputs = Linear(hidden_size, {"conv_inputs": Part.whole(3 * spec.size)}, spec.bias, kernels)
        self.weight = kernels.vector(spec.size * spec.kernel).reshape(spec.size, spec.kernel)
        self.bias = kernels.vector(spec.size) if spec.bias else None
        self.output = Linear(spec.size, {"conv_output": Part.whole(hidden_size)}, spec.bias, kernels)

    def mix(self, x: torch.Tensor, states: StepStates) -> torch.Tensor:
        """Map x [T, hidden] to [T, size], the input of the output projection, and advance the states."""
        b, c, x = self.inputs.forward(x).chunk(3, -1)
        gated, (state,) = self._kernels.multiply(b, x), states.memory.layers[self.place]
        out = gated.new_empty(gated.shape)
        states.keep_drafts(self.place, gated)
        states.run(state, lambda rows: self._kernels.short_conv(gated, self.weight, self.bias, state, rows, out))
        return self._kernels.multiply(out, c)

    def replay(self, inputs: Sequence[Any], state: Sequence[Any], rows: StateRows) -> None:
        """Advance the layer's states by tokens whose inputs were kept; see `StepStates.keep_drafts`."""
        (gated,), (before,) = inputs, state
        self._kernels.short_conv(gated, self.weight, self.bias, before, rows, empty_like(gated, gated.shape))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block."""
        yield from self.inputs.targets(scope)
        yield scope.filters("conv", self.weight)
        if self.bias is not None:
            yield scope.vector("conv", self.bias, "bias")
        yield from self.output.targets(scope)
