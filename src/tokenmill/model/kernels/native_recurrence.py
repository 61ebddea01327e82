"""Native kernels of layers that keep a state; their torch reference is in `recurrence`.

Tensors are bfloat16, the states of the delta rule float32. Rows and states may have any stride; each is contiguous.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.states import StateRows
from tokenmill.model.kernels.torch_kernels import TorchKernels

if TYPE_CHECKING:
    from tokenmill import _native


class NativeRecurrence(TorchKernels):
    """The stateful part of `NativeKernels`: a token's bits depend only on its own request, not on its cuts into steps.

    Attributes:
        native: the kernels of this machine.
    """

    def __init__(self, native: _native.Kernels, device: str = "cpu") -> None:
        super().__init__(torch.bfloat16, device)
        self.native = native

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        rows: StateRows,
        out: torch.Tensor,
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
        _check_pieces(torch.bfloat16, weight, state[0], out, *([] if bias is None else [bias]))
        added = 0 if bias is None else bias.data_ptr()
        inputs, memory = (x.data_ptr(), x.stride(0), weight.data_ptr(), added), (state.data_ptr(), state.stride(0))
        self.native.short_conv(bind_rows(rows, len(x)), *inputs, *memory, out.data_ptr(), channels, width, silu)

    def delta_rule(
        self,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state: torch.Tensor,
        rows: StateRows,
        out: torch.Tensor,
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
        _check_pieces(torch.bfloat16, a_log, dt_bias, out)
        _check_pieces(torch.float32, state[0])
        inputs = mixed.data_ptr(), mixed.stride(0), gates.data_ptr(), gates.stride(0)
        memory, sizes = (state.data_ptr(), state.stride(0)), (num_keys, num_heads, key_size, value_size)
        vectors = a_log.data_ptr(), dt_bias.data_ptr()
        self.native.delta_rule(bind_rows(rows, len(mixed)), *inputs, *vectors, *memory, out.data_ptr(), *sizes)

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the norm of x over each head, times the weight and silu(gate)."""
        assert x.shape == gate.shape and x.shape[1] % len(weight) == 0, "whole heads, each with its gate"
        _check_rows(x, gate)
        _check_pieces(torch.bfloat16, weight)
        out, sizes = x.new_empty(x.shape), (len(x), x.shape[1] // len(weight), len(weight))
        inputs = x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), weight.data_ptr()
        self.native.gated_norm(*inputs, eps, out.data_ptr(), *sizes)
        return out

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return x * sigmoid(gate) as a new tensor."""
        assert x.shape == gate.shape, "a gate for each number"
        _check_rows(x, gate)
        out = x.new_empty(x.shape)
        self.native.sigmoid_gate(x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), out.data_ptr(), *x.shape)
        return out


def bind_rows(rows: StateRows, num_tokens: int) -> _native.StateRows:
    """Pass the rows of a step with `num_tokens` tokens to the native code by their addresses."""
    assert len(rows.slots) == len(rows.starts) == len(rows.stops) == len(rows.spans), "a slot for each span"
    assert rows.spans[-1, 1] <= num_tokens, "spans of tokens that are there"
    _check_pieces(torch.int64, rows.slots)
    _check_pieces(torch.int32, rows.starts, rows.stops)
    addresses = rows.slots.data_ptr(), rows.starts.data_ptr(), rows.stops.data_ptr()
    bound: _native.StateRows = importlib.import_module(MODULE).StateRows(*addresses, len(rows.slots))
    return bound


def _check_rows(*tensors: torch.Tensor) -> None:
    assert all(each.dtype == torch.bfloat16 and each.stride(-1) == 1 for each in tensors), "rows of bfloat16 in a piece"


def _check_pieces(dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    assert all(each.dtype == dtype and each.is_contiguous() for each in tensors), f"{dtype}, in one piece"
