"""The gated delta network that Qwen3-Next and Qwen3.5 have in three of four layers instead of attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.model.architecture.recurrence_spec import DeltaNetSpec
from tokenmill.model.kernels.operands import empty_like
from tokenmill.model.kernels.protocol import Kernels, WeightRole
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch

    from tokenmill.model.kernels.states import StateRows, StepStates


class DeltaNet:
    """A block that sends q, k and v through a short convolution and the delta rule, and norms heads that z gates.

    Args:
        place: index of its states among those of the model.

    Attributes:
        mixed: q, k and v of all heads. gates: b, how much of a value is written, and a, how much is kept. In
            bfloat16 whatever the others are in: they are small, and what is kept multiplies over all tokens.
        filters: [mixed_width, kernel], of the convolution.
    """

    __slots__ = ("_kernels", "a_log", "dt_bias", "filters", "gates", "mixed", "norm", "output", "place", "spec", "z")

    def __init__(self, spec: DeltaNetSpec, place: int, hidden_size: int, kernels: Kernels) -> None:
        self.spec, self.place, self._kernels = spec, place, kernels
        keys, values = Part.whole(spec.keys_width), Part.whole(spec.values_width)
        heads = Part.whole(spec.num_value_heads)
        self.mixed = Linear(hidden_size, {"delta_q": keys, "delta_k": keys, "delta_v": values}, False, kernels)
        self.z = Linear(hidden_size, {"delta_z": values}, False, kernels)
        self.gates = Linear(hidden_size, {"delta_b": heads, "delta_a": heads}, False, kernels, WeightRole.ROUTER)
        self.filters = kernels.vector(spec.mixed_width * spec.kernel).reshape(spec.mixed_width, spec.kernel)
        self.a_log, self.dt_bias = kernels.vector(spec.num_value_heads), kernels.vector(spec.num_value_heads)
        self.norm = kernels.vector(spec.value_size)
        self.output = Linear(spec.values_width, {"delta_output": Part.whole(hidden_size)}, False, kernels)

    def mix(self, x: torch.Tensor, states: StepStates) -> torch.Tensor:
        """Map x [T, hidden] to [T, values_width], the input of the output projection, and advance the states."""
        kernels, (inputs, matrices) = self._kernels, states.memory.layers[self.place]
        raw, gates = self.mixed.forward(x), self.gates.forward(x)
        mixed = raw.new_empty(raw.shape)
        states.keep_drafts(self.place, raw, gates)
        states.run(inputs, lambda rows: kernels.short_conv(raw, self.filters, None, inputs, rows, mixed, silu=True))
        out = mixed.new_empty(len(x), self.spec.values_width)
        states.run(
            matrices, lambda rows: kernels.delta_rule(mixed, gates, self.a_log, self.dt_bias, matrices, rows, out)
        )
        return kernels.gated_rms_norm(out, self.z.forward(x), self.norm, self.spec.norm.eps)

    def replay(self, inputs: Sequence[Any], state: Sequence[Any], rows: StateRows) -> None:
        """Advance the layer's states by tokens whose inputs were kept; see `StepStates.keep_drafts`."""
        kernels, (raw, gates), (before, matrices) = self._kernels, inputs, state
        mixed, out = empty_like(raw, raw.shape), empty_like(raw, (len(raw), self.spec.values_width))
        kernels.short_conv(raw, self.filters, None, before, rows, mixed, silu=True)
        kernels.delta_rule(mixed, gates, self.a_log, self.dt_bias, matrices, rows, out)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block."""
        yield from self._projections(scope)
        yield scope.filters("delta_filters", self.filters)
        yield scope.vector("delta", self.a_log, "A_log")
        yield scope.vector("delta", self.dt_bias, "dt_bias")
        yield scope.vector("delta_norm", self.norm)
        yield from self.output.targets(scope)

    def _projections(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the projections of x: each a tensor of its own, or all in one tensor, key head by key head."""
        if scope.names["delta_z"] != scope.names["delta_q"]:
            for linear in (self.mixed, self.z, self.gates):
                yield from linear.targets(scope)
            return
        spec = self.spec
        group = spec.num_value_heads // spec.num_key_heads
        sizes = {"delta_q": spec.key_size, "delta_k": spec.key_size}
        sizes |= dict.fromkeys(("delta_v", "delta_z"), group * spec.value_size)
        yield from _of_key_heads(scope, spec.num_key_heads, sizes, [self.mixed, self.z])
        yield from _of_key_heads(scope, spec.num_key_heads, {"delta_b": group, "delta_a": group}, [self.gates])


def _of_key_heads(scope: TargetScope, num_heads: int, sizes: dict[str, int], linears: list[Linear]) -> Iterator[Target]:
    """Yield targets of projections stored head by head: |q k v z of head 0|q k v z of head 1| ...

    Args:
        sizes: rows of one head, by role, in the order in which they are stored.
    """
    stride, before = sum(sizes.values()), dict(zip(sizes, _starts(sizes.values()), strict=True))
    for linear in linears:
        start = 0
        for role, part in linear.parts.items():
            first = [head * stride + before[role] for head in range(num_heads)]
            picks = [row for begin in first for row in range(begin, begin + sizes[role])]
            yield scope.picked(role, linear.weight, start, picks, num_heads * stride)
            start += part.count


def _starts(sizes: Iterable[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts[:-1]
