"""The state space that Granite 4 has in most of its layers instead of attention: Mamba-2 (Dao and Gu 2024).

A state of one matrix per head takes the place of keys and values. It fades by what a token lets it keep, a product of
the token's own numbers is added, and the output is read from the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.model.architecture.recurrence_spec import StateSpaceSpec
from tokenmill.model.kernels.operands import empty_like
from tokenmill.model.kernels.protocol import Kernels, WeightRole
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch

    from tokenmill.model.kernels.states import StateRows, StepStates


class StateSpace:
    """A block that sends x, B and C through a short convolution and a state space, and norms what a gate lets through.

    Args:
        place: index of its states among those of the model.

    Attributes:
        inputs: the gate, then x, B and C. steps: how far each head goes with a token. In bfloat16 whatever the others
            are in: they are few, and what is kept multiplies over all tokens.
        filters: [mixed_width, kernel], of the convolution. bias: [mixed_width]; None: absent.
        skip: [heads], how much of x is added to the output.
    """

    __slots__ = (
        "_kernels",
        "a_log",
        "bias",
        "dt_bias",
        "filters",
        "inputs",
        "norm",
        "output",
        "place",
        "skip",
        "spec",
        "steps",
    )

    def __init__(self, spec: StateSpaceSpec, place: int, hidden_size: int, kernels: Kernels) -> None:
        self.spec, self.place, self._kernels = spec, place, kernels
        inputs, heads = Part.whole(spec.inner_width + spec.mixed_width), Part.whole(spec.num_heads)
        self.inputs = Linear(hidden_size, {"mamba_inputs": inputs}, spec.has_biases, kernels)
        self.steps = Linear(hidden_size, {"mamba_steps": heads}, spec.has_biases, kernels, WeightRole.ROUTER)
        self.filters = kernels.vector(spec.mixed_width * spec.kernel).reshape(spec.mixed_width, spec.kernel)
        self.bias = kernels.vector(spec.mixed_width) if spec.has_filter_bias else None
        self.a_log, self.dt_bias, self.skip = (kernels.vector(spec.num_heads) for _ in range(3))
        self.norm = kernels.vector(spec.inner_width)
        self.output = Linear(spec.inner_width, {"mamba_output": Part.whole(hidden_size)}, spec.has_biases, kernels)

    def mix(self, x: torch.Tensor, states: StepStates) -> torch.Tensor:
        """Map x [T, hidden] to [T, inner_width], the input of the output projection, and advance the states."""
        kernels, spec, (inputs, matrices) = self._kernels, self.spec, states.memory.layers[self.place]
        projected, steps = self.inputs.forward(x), self.steps.forward(x)
        gate, raw = projected[:, : spec.inner_width], projected[:, spec.inner_width :]
        mixed = projected.new_empty(len(x), spec.mixed_width)
        states.keep_drafts(self.place, raw, steps)
        states.run(
            inputs, lambda rows: kernels.short_conv(raw, self.filters, self.bias, inputs, rows, mixed, silu=True)
        )
        out = mixed.new_empty(len(x), spec.inner_width)
        vectors = self.a_log, self.dt_bias, self.skip
        states.run(matrices, lambda rows: kernels.state_space(mixed, steps, *vectors, matrices, rows, out))
        return kernels.gated_group_norm(out, gate, self.norm, spec.num_groups, spec.norm.eps)

    def replay(self, inputs: Sequence[Any], state: Sequence[Any], rows: StateRows) -> None:
        """Advance the layer's states by tokens whose inputs were kept; see `StepStates.keep_drafts`."""
        kernels, (raw, steps), (before, matrices) = self._kernels, inputs, state
        mixed, out = empty_like(raw, raw.shape), empty_like(raw, (len(raw), self.spec.inner_width))
        kernels.short_conv(raw, self.filters, self.bias, before, rows, mixed, silu=True)
        kernels.state_space(mixed, steps, self.a_log, self.dt_bias, self.skip, matrices, rows, out)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block; one has the rows of both projections of x."""
        total, start = sum(linear.columns.count for linear in (self.inputs, self.steps)), 0
        for linear in (self.inputs, self.steps):
            part = Part(start, linear.columns.count, total)
            yield scope.matrix(linear.role, linear.weight, 0, part)
            if linear.bias is not None:
                yield scope.vector(linear.role, linear.bias, "bias", part)
            start += part.count
        yield scope.filters("mamba_filters", self.filters)
        if self.bias is not None:
            yield scope.vector("mamba_filters", self.bias, "bias")
        yield scope.vector("mamba", self.a_log, "A_log")
        yield scope.vector("mamba", self.dt_bias, "dt_bias")
        yield scope.vector("mamba", self.skip, "D")
        yield scope.vector("mamba_norm", self.norm)
        yield from self.output.targets(scope)
