"""Bind layers with recurrences to a native pass: their weights and their states, by address."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_recurrence import bind_rows
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.states import StateMemory, StepStates
from tokenmill.model.models.delta_net import DeltaNet
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.short_conv import ShortConv
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill import _native


class NativeStates:
    """The states of a model, by their addresses.

    Attributes:
        memory: the memory of the states; it stays where it is.
    """

    __slots__ = ("_native", "memory")

    def __init__(self, memory: StateMemory) -> None:
        self.memory = memory
        self._native: _native.StateMemory = importlib.import_module(MODULE).StateMemory()
        for tensors in memory.layers:
            assert all(tensor.is_contiguous() for tensor in tensors), "slots follow one another"
            inputs, matrices = (*tensors, None)[:2]
            wide = (0, 0) if matrices is None else (matrices.data_ptr(), matrices.stride(0))
            self._native.add(inputs.data_ptr(), inputs.stride(0), *wide)

    def step(self, states: StepStates, num_tokens: int) -> _native.StepStates:
        """Bind the states that the tokens of a step run through; `states` must live as long as the result."""
        first, rest = bind_rows(states.first, num_tokens), states.rest
        behind, copies = None if rest is None else bind_rows(rest, num_tokens), (0, 0, 0)
        if states.sources is not None and states.targets is not None:
            assert states.sources.is_contiguous() and states.targets.is_contiguous(), "slots lie in one piece"
            copies = states.sources.data_ptr(), states.targets.data_ptr(), len(states.sources)
        bound: _native.StepStates = importlib.import_module(MODULE).StepStates(self._native, first, behind, *copies)
        return bound


def bind_recurrence(own: ShortConv | DeltaNet) -> _native.Recurrence:
    """Bind a layer's recurrence by its addresses.

    Raises:
        ValueError: sizes for which there is no kernel; see `NativeRecurrence`.
    """
    native = importlib.import_module(MODULE)
    if isinstance(own, ShortConv):
        bias = 0 if own.bias is None else address(own.bias)
        inputs = bind_projection(own.inputs), address(own.weight), bias
        short: _native.Recurrence = native.Recurrence(*inputs, *own.weight.shape)
        return short
    spec, (channels, width) = own.spec, own.filters.shape
    bound: _native.Recurrence = native.Recurrence(bind_projection(own.mixed), address(own.filters), 0, channels, width)
    vectors = address(own.a_log), address(own.dt_bias), address(own.norm)
    heads = spec.num_key_heads, spec.num_value_heads, spec.key_size, spec.value_size
    bound.delta_net(bind_projection(own.z), bind_projection(own.gates, channels), *vectors, spec.norm.eps, *heads)
    return bound


def bind_projection(linear: Linear, column: int = 0) -> _native.Projection:
    """Bind a projection. `column`: where its outputs begin among those of all ranks, or in a shared buffer."""
    assert isinstance(linear.weight, PackedWeight), "its matrices are packed"
    projection: _native.Projection = importlib.import_module(MODULE).Projection(
        linear.weight.packed, 0 if linear.bias is None else address(linear.bias), column
    )
    return projection
