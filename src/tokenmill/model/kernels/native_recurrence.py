"""Native kernels of layers that keep a state; their torch reference is in `recurrence`.

Numbers are bfloat16, in NumPy arrays of their bits or in tensors; the states of the delta rule are float32. Rows and
states may have any stride; each is contiguous.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.operands import empty_like, in_one_piece, in_pieces, is_a, stride
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.model.kernels.states import StateRows
    from tokenmill.platform.arrays import Array


class NativeRecurrence:
    """The stateful part of `NativeKernels`: a token's bits depend only on its own request, not on its cuts into steps.

    Attributes:
        native: the kernels of this machine.
    """

    def __init__(self, native: _native.Kernels) -> None:
        self.native = native

    def short_conv(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        state: Array,
        rows: StateRows,
        out: Array,
        silu: bool = False,
    ) -> None:
        """Run the causal convolution of each request natively.

        Raises:
            ValueError: a convolution of one token, or of more than 8.
        """
        channels, width = weight.shape
        assert x.shape[1] == channels and state.shape[1:] == (channels, width - 1), "a state fits its weights"
        _check_rows(x)
        assert out.shape == x.shape, "a number for each"
        _check_pieces("bfloat16", weight, state[0], out, *([] if bias is None else [bias]))
        added = 0 if bias is None else address(bias)
        inputs, memory = (address(x), stride(x), address(weight), added), (address(state), stride(state))
        self.native.short_conv(bind_rows(rows, len(x)), *inputs, *memory, address(out), channels, width, silu)

    def delta_rule(
        self,
        mixed: Array,
        gates: Array,
        a_log: Array,
        dt_bias: Array,
        state: Array,
        rows: StateRows,
        out: Array,
    ) -> None:
        """Run the gated delta rule of each request natively.

        Raises:
            ValueError: heads whose size is not a multiple of 16, or is above 256.
        """
        num_heads, key_size, value_size = state.shape[1:]
        num_keys = (mixed.shape[1] - num_heads * value_size) // (2 * key_size)
        assert mixed.shape[1] == 2 * num_keys * key_size + num_heads * value_size, "q, k and v of whole heads"
        assert gates.shape == (len(mixed), 2 * num_heads) and len(a_log) == len(dt_bias) == num_heads, "gates of heads"
        _check_rows(mixed, gates)
        assert out.shape == (len(mixed), num_heads * value_size), "values of heads"
        _check_pieces("bfloat16", a_log, dt_bias, out)
        _check_pieces("float32", state[0])
        inputs = address(mixed), stride(mixed), address(gates), stride(gates)
        memory, sizes = (address(state), stride(state)), (num_keys, num_heads, key_size, value_size)
        vectors = address(a_log), address(dt_bias)
        self.native.delta_rule(bind_rows(rows, len(mixed)), *inputs, *vectors, *memory, address(out), *sizes)

    def state_space(
        self,
        mixed: Array,
        steps: Array,
        a_log: Array,
        dt_bias: Array,
        skip: Array,
        state: Array,
        rows: StateRows,
        out: Array,
    ) -> None:
        """Run the state space of each request natively.

        Raises:
            ValueError: heads or states whose size is not a multiple of 16, or is above 256.
        """
        num_heads, state_size, size = state.shape[1:]
        num_groups = (mixed.shape[1] - num_heads * size) // (2 * state_size)
        assert mixed.shape[1] == num_heads * size + 2 * num_groups * state_size, "x, and B and C of whole groups"
        assert steps.shape == (len(mixed), num_heads) and len(a_log) == len(dt_bias) == len(skip) == num_heads, "heads"
        assert out.shape == (len(mixed), num_heads * size), "numbers of heads"
        _check_rows(mixed, steps)
        _check_pieces("bfloat16", a_log, dt_bias, skip, out)
        _check_pieces("float32", state[0])
        inputs = address(mixed), stride(mixed), address(steps), stride(steps)
        vectors, memory = (address(a_log), address(dt_bias), address(skip)), (address(state), stride(state))
        sizes = num_heads, num_groups, size, state_size
        self.native.state_space(bind_rows(rows, len(mixed)), *inputs, *vectors, *memory, address(out), *sizes)

    def gated_rms_norm(self, x: Any, gate: Array, weight: Array, eps: float) -> Any:
        """Return the norm of x over each head, times the weight and silu(gate)."""
        assert x.shape == gate.shape and x.shape[1] % len(weight) == 0, "whole heads, each with its gate"
        _check_rows(x, gate)
        _check_pieces("bfloat16", weight)
        out, sizes = empty_like(x, x.shape), (len(x), x.shape[1] // len(weight), len(weight))
        inputs = address(x), stride(x), address(gate), stride(gate), address(weight)
        self.native.gated_norm(*inputs, eps, address(out), *sizes, False)
        return out

    def gated_group_norm(self, x: Any, gate: Array, weight: Array, num_groups: int, eps: float) -> Any:
        """Return the norm of x * silu(gate) over each group, times the weight."""
        assert x.shape == gate.shape and x.shape[1:] == weight.shape, "a gate and a weight for each number"
        assert x.shape[1] % num_groups == 0, "whole groups"
        _check_rows(x, gate)
        _check_pieces("bfloat16", weight)
        out, sizes = empty_like(x, x.shape), (len(x), num_groups, x.shape[1] // num_groups)
        inputs = address(x), stride(x), address(gate), stride(gate), address(weight)
        self.native.gated_norm(*inputs, eps, address(out), *sizes, True)
        return out

    def sigmoid_gate(self, x: Any, gate: Array) -> Any:
        """Return x * sigmoid(gate) as a new tensor."""
        assert x.shape == gate.shape, "a gate for each number"
        _check_rows(x, gate)
        out = empty_like(x, x.shape)
        self.native.sigmoid_gate(address(x), stride(x), address(gate), stride(gate), address(out), *x.shape)
        return out


def bind_rows(rows: StateRows, num_tokens: int) -> _native.StateRows:
    """Pass the rows of a step with `num_tokens` tokens to the native code by their addresses."""
    assert len(rows.slots) == len(rows.starts) == len(rows.stops) == len(rows.spans), "a slot for each span"
    assert rows.spans[-1, 1] <= num_tokens, "spans of tokens that are there"
    _check_pieces("int64", rows.slots)
    _check_pieces("int32", rows.starts, rows.stops)
    addresses = address(rows.slots), address(rows.starts), address(rows.stops)
    bound: _native.StateRows = importlib.import_module(MODULE).StateRows(*addresses, len(rows.slots), rows.keeps)
    return bound


def _check_rows(*arrays: Array) -> None:
    assert is_a("bfloat16", *arrays) and in_pieces(*arrays), "rows of bfloat16 in a piece"


def _check_pieces(dtype: str, *arrays: Array) -> None:
    assert is_a(dtype, *arrays) and in_one_piece(*arrays), f"{dtype}, in one piece"
