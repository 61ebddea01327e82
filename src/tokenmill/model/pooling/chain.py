"""`PoolingChain`: what follows the pooled states, for all rows of a step at once: layers, activations, cut and norm.

Runs in NumPy, in float32, on every device: a few vectors a step. A row's numbers do not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.pooling import PoolingParams, PoolingTask
from tokenmill.model.pooling.spec import Activation

Floats = npt.NDArray[np.float32]
Vectors = npt.NDArray[np.float64]


class Layer(Protocol):
    """A layer with its weights."""

    def __call__(self, vectors: Floats) -> Floats:
        """Return the layer's output, [R, out], for [R, in]."""


class Dense(msgspec.Struct, frozen=True):
    """activation(x W^T + b), perhaps added to x. `weight`: [out, in]; `bias`: [out]; both float32."""

    weight: Floats
    bias: Floats | None
    activation: Activation = Activation.IDENTITY
    has_residual: bool = False

    def __call__(self, vectors: Floats) -> Floats:
        """Return the layer's output, [R, out], for [R, in]."""
        # One product for each row: in a product of all, a row's last bits would depend on how many rows there are.
        found: Floats = np.matmul(vectors[:, None, :], self.weight.T)[:, 0]
        if self.bias is not None:
            found += self.bias
        found = ACTIVATIONS[self.activation](found)
        if self.has_residual:
            found += vectors
        return found


class LayerNorm(msgspec.Struct, frozen=True):
    """A layer norm; `weight` and `bias`: [size] float32."""

    weight: Floats
    bias: Floats | None
    eps: float

    def __call__(self, vectors: Floats) -> Floats:
        """Return the norm of [R, size]."""
        centred = vectors - vectors.mean(1, keepdims=True)
        scaled = centred / np.sqrt((centred * centred).mean(1, keepdims=True) + np.float32(self.eps))
        found: Floats = scaled * self.weight
        return found if self.bias is None else found + self.bias


class PoolingChain(msgspec.Struct, frozen=True):
    """The way from pooled states to vectors or scores. Without anything given: of a model that generates.

    Attributes:
        layers: in order; empty: the pooled states are the vector.
        activation: of scores.
    """

    layers: Sequence[Layer] = ()
    task: PoolingTask = PoolingTask.EMBED
    activation: Activation = Activation.IDENTITY

    @np.errstate(all="ignore")
    def run(self, pooled: Vectors, params: Sequence[PoolingParams]) -> list[npt.NDArray[np.floating[Any]]]:
        """Return each row's vector or scores, of any float type.

        Args:
            pooled: [R, size], the pooled states.
            params: of each row.
        """
        vectors: npt.NDArray[Any] = pooled
        if self.layers:
            vectors = pooled.astype(np.float32)
            for layer in self.layers:
                vectors = layer(vectors)
        if self.task is PoolingTask.EMBED:
            return [_cut(vector.astype(np.float64), own) for vector, own in zip(vectors, params, strict=True)]
        activated = ACTIVATIONS[self.activation](vectors)
        return [activated[row] if own.activates else vectors[row] for row, own in enumerate(params)]


def _cut(vector: Vectors, params: PoolingParams) -> Vectors:
    """Return the first dimensions of a vector, of length 1 if that is asked for."""
    vector = vector[: params.dimensions] if params.dimensions else vector
    if not params.normalizes:
        return vector
    # The sum of the squares is rounded once: it has no order in which processors and libraries could differ.
    length = math.sqrt(math.fsum((vector * vector).tolist()))
    return vector / max(length, 1e-12)  # a NaN stays one


def _sigmoid(values: Floats) -> Floats:
    exponents = np.exp(-np.abs(values))
    return np.where(values >= 0, 1 / (1 + exponents), exponents / (1 + exponents)).astype(values.dtype)


def _softmax(values: Floats) -> Floats:
    powers: Floats = np.exp(values - values.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return powers


def _gelu(values: Floats) -> Floats:
    bends: Floats = _ERF(values / np.float32(math.sqrt(2))).astype(np.float32)
    bends += np.float32(1)
    bends *= values
    bends /= np.float32(2)
    return bends


_ERF = np.frompyfunc(math.erf, 1, 1)
ACTIVATIONS: Mapping[Activation, Callable[[Floats], Floats]] = MappingProxyType(
    {
        Activation.IDENTITY: lambda values: values,
        Activation.SIGMOID: _sigmoid,
        Activation.SOFTMAX: _softmax,
        Activation.TANH: np.tanh,
        Activation.GELU: _gelu,
        Activation.RELU: lambda values: np.maximum(values, np.float32(0)),
        Activation.SILU: lambda values: values * _sigmoid(values),
    }
)
