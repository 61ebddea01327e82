"""Bind layers with recurrences to a native pass: their weights and their states, by address."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING

from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_recurrence import bind_rows
from tokenmill.model.kernels.states import StateMemory, StepStates
from tokenmill.model.models.delta_net import DeltaNet
from tokenmill.model.models.mamba import StateSpace
from tokenmill.model.models.native_projection import address_of, bind_projection
from tokenmill.model.models.short_conv import ShortConv
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array


class NativeStates:
    """The states of a model, by their addresses.

    Attributes:
        memory: the memory of the states; it stays where it is.
    """

    __slots__ = ("_native", "memory")

    def __init__(self, memory: StateMemory) -> None:
        self.memory = memory
        self._native: _native.StateMemory = importlib.import_module(MODULE).StateMemory()
        for inputs, *others in memory.layers:
            wide = _slots(others[0]) if others else (0, 0)
            self._native.add(*_slots(inputs), *wide)

    def step(self, states: StepStates, num_tokens: int) -> _native.StepStates:
        """Bind the states that the tokens of a step run through; `states` must live as long as the result."""
        first, rest = bind_rows(states.first, num_tokens), states.rest
        behind, copies = None if rest is None else bind_rows(rest, num_tokens), (0, 0, 0)
        if states.sources is not None and states.targets is not None:
            copies = address(states.sources), address(states.targets), len(states.sources)
        bound: _native.StepStates = importlib.import_module(MODULE).StepStates(self._native, first, behind, *copies)
        if states.drafts is not None and states.inputs is not None:
            kept = [(address(inputs), address(gates[0]) if gates else 0) for inputs, *gates in states.inputs.layers]
            bound.add_drafts(bind_rows(states.drafts, num_tokens), kept)
        return bound


def bind_recurrence(own: ShortConv | DeltaNet | StateSpace) -> _native.Recurrence:
    """Bind a layer's recurrence by its addresses.

    Raises:
        ValueError: sizes for which there is no kernel; see `NativeRecurrence`.
    """
    native = importlib.import_module(MODULE)
    if isinstance(own, ShortConv):
        inputs = bind_projection(own.inputs), address(own.weight), address_of(own.bias)
        short: _native.Recurrence = native.Recurrence(*inputs, *own.weight.shape)
        return short
    if isinstance(own, StateSpace):
        return _bind_state_space(own)
    spec, (channels, width) = own.spec, own.filters.shape
    bound: _native.Recurrence = native.Recurrence(bind_projection(own.mixed), address(own.filters), 0, channels, width)
    vectors = address(own.a_log), address(own.dt_bias), address(own.norm)
    heads = spec.num_key_heads, spec.num_value_heads, spec.key_size, spec.value_size
    bound.delta_net(bind_projection(own.z), bind_projection(own.gates, channels), *vectors, spec.norm.eps, *heads)
    return bound


def _bind_state_space(own: StateSpace) -> _native.Recurrence:
    spec, (channels, width) = own.spec, own.filters.shape
    filters = address(own.filters), address_of(own.bias)
    inputs, steps = bind_projection(own.inputs), bind_projection(own.steps, spec.inner_width + channels)
    bound: _native.Recurrence = importlib.import_module(MODULE).Recurrence(inputs, *filters, channels, width)
    vectors = address(own.a_log), address(own.dt_bias), address(own.skip), address(own.norm)
    sizes = spec.num_heads, spec.num_groups, spec.head_size, spec.state_size
    bound.state_space(steps, *vectors, spec.norm.eps, *sizes)
    return bound


def _slots(states: Array) -> tuple[int, int]:
    """Return where slots that follow one another begin, and how many numbers each has."""
    return address(states), math.prod(states.shape[1:])
