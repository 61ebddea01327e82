"""Python wrappers of the native kernels that work row by row; their torch reference is in `torch_kernels`.

They take NumPy arrays, of bfloat16 the bits, or tensors, and give what they take; weights may be of either kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.model.kernels.operands import empty_like, in_one_piece, in_pieces, is_a, stride
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.model.kernels.protocol import Activation, SigmoidScores
    from tokenmill.platform.arrays import Array

# 1 in bfloat16.
_ONE = 0x3F80


def rms_norm(
    native: _native.Kernels,
    x: Any,
    weight: Array,
    eps: float,
    delta: Array | None = None,
    scale: float = 1.0,
    is_offset: bool = False,
) -> Any:
    """Add `scale` * `delta` [T, size] to x [T, size] bfloat16 in place, if given, and return the norm of x.

    x and delta may have any row stride; each row is contiguous. See `Kernels.rms_norm` and `Kernels.add_rms_norm`.
    """
    count, size = x.shape
    _check_norm(x, weight, delta)
    out = empty_like(x, (count, size))
    added = (0, 0) if delta is None else (address(delta), stride(delta))
    rows = address(x), stride(x), *added
    native.rms_norm(*rows, scale, address(weight), is_offset, eps, address(out), count, size)
    return out


def layer_norm(
    native: _native.Kernels, x: Any, weight: Array, bias: Array | None, eps: float, delta: Array | None = None
) -> Any:
    """Add `delta` [T, size] to x [T, size] bfloat16 in place, if given, and return the LayerNorm of x."""
    count, size = x.shape
    _check_norm(x, weight, delta)
    assert bias is None or (is_a("bfloat16", bias) and in_pieces(bias)), "a bias is like a weight"
    out = empty_like(x, (count, size))
    added = (0, 0) if delta is None else (address(delta), stride(delta))
    weights = address(weight), 0 if bias is None else address(bias)
    native.layer_norm(address(x), stride(x), *added, *weights, eps, address(out), count, size)
    return out


def activate(native: _native.Kernels, x: Any, activation: Activation) -> Any:
    """Apply an activation to x, contiguous bfloat16, in place."""
    assert is_a("bfloat16", x) and in_one_piece(x), "numbers are bfloat16 in one piece"
    native.activate(address(x), x.nbytes // 2, activation)
    return x


def add_gated(native: _native.Kernels, sums: Any, x: Array, gate: Array) -> Any:
    """Add x * sigmoid(gate) to sums in place; both [T, size] contiguous bfloat16, gate [T, 1]. Return the sums."""
    count, size = x.shape
    assert sums.shape == x.shape and gate.shape == (count, 1), "a gate for each row"
    assert in_one_piece(sums, x, gate), "all are in one piece"
    assert is_a("bfloat16", sums, x, gate), "numbers are bfloat16"
    ones, opened, rows = np.full(count, _ONE, np.uint16), np.empty(count, np.uint16), np.arange(count, dtype=np.int64)
    native.sigmoid_gate(address(ones), 1, address(gate), 1, address(opened), count, 1)
    native.add_weighted(address(x), address(opened), address(rows), address(sums), count, size)
    return sums


def multiply(native: _native.Kernels, x: Any, y: Array) -> Any:
    """Return x * y, [T, size] bfloat16, whose rows are each in one piece."""
    assert x.shape == y.shape and is_a("bfloat16", x, y), "as many numbers of bfloat16"
    assert in_pieces(x, y), "a row is in one piece"
    out = empty_like(x, x.shape)
    native.multiply_rows(address(x), stride(x), address(y), stride(y), address(out), *x.shape)
    return out


def scaled_sum(native: _native.Kernels, x: Any, factor: float, delta: Array | None, scale: float) -> Any:
    """Return (x + scale * delta) * factor, contiguous bfloat16, computed in place."""
    assert is_a("bfloat16", x) and in_one_piece(x), "numbers are bfloat16 in one piece"
    if delta is not None:
        assert delta.shape == x.shape and is_a("bfloat16", delta) and in_one_piece(delta), "a delta is like x"
    native.scaled_sum(address(x), 0 if delta is None else address(delta), scale, factor, x.nbytes // 2)
    return x


def route(
    native: _native.Kernels, logits: Any, count: int, normalizes: bool, sigmoid: SigmoidScores | None = None
) -> tuple[Any, Any]:
    """Choose the `count` experts with the largest logits [T, experts] bfloat16; see `Kernels.route`."""
    tokens, experts = logits.shape
    assert is_a("bfloat16", logits) and in_pieces(logits), "a row of bfloat16 is in one piece"
    assert 1 <= count <= experts, "a token has experts, and each once"
    weights, ids = empty_like(logits, (tokens, count)), empty_like(logits, (tokens, count), "int64")
    found = address(ids), address(weights)
    are_sigmoids, bias, scale = bound_scores(sigmoid, experts)
    inputs, scores = (address(logits), stride(logits), tokens, experts, count), (bias, scale)
    native.route(*inputs, normalizes, *found, are_sigmoids, *scores)
    return weights, ids


def bound_scores(sigmoid: SigmoidScores | None, experts: int) -> tuple[bool, int, float]:
    """Return whether scores are sigmoids, the address of their biases, and their scale."""
    if sigmoid is None:
        return False, 0, 1.0
    bias = sigmoid.bias
    assert bias is None or (is_a("float32", bias) and in_one_piece(bias) and len(bias) == experts), "one for each"
    return True, 0 if bias is None else address(bias), sigmoid.scale


def _check_norm(x: Array, weight: Array, delta: Array | None) -> None:
    assert is_a("bfloat16", x, weight), f"norms are of bfloat16, not {x.dtype}"
    assert in_pieces(x, weight), "a row is in one piece"
    if delta is not None:
        assert delta.shape == x.shape and is_a("bfloat16", delta) and in_pieces(delta), "a delta is like x"
