"""Error feedback of GPTQ (arXiv:2210.17323): what one number loses in rounding, later ones of its row make up for.

Inputs of a matrix go together, so that the error of one number's product can be undone, in part, by numbers of other
inputs. How, is in the inverse of the products' sums of all pairs of inputs over a text. Pairs count that lie in the same
span of inputs: that takes memory and time in proportion to a matrix, and a short text says nothing of more pairs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SPAN = 128
"""Inputs in a span."""
# Added to all sums of squares, as a share of their mean, as in GPTQ: few rows say little.
DAMPING = 0.01


def feedback_of(inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return by which share of the error of an input's number those of later inputs change, [spans, span, span] float32.

    Row i of a span is of the error of input i; it is 0 up to i. Of the last span inputs may be missing.

    Args:
        inputs: rows of x, [n, in_size].
    """
    count, size = inputs.shape
    padded = np.zeros((count, -(-size // SPAN) * SPAN))
    padded[:, :size] = inputs
    by_span = padded.reshape(count, -1, SPAN).swapaxes(0, 1)
    sums = by_span.swapaxes(1, 2) @ by_span
    squares = np.einsum("sii->si", sums)
    squares += DAMPING * squares.sum(1, keepdims=True) / SPAN + np.finfo(np.float32).tiny
    upper = np.linalg.cholesky(np.linalg.inv(sums)).swapaxes(1, 2)
    shares = upper / np.einsum("sii->si", upper)[:, :, None]
    return np.ascontiguousarray(np.triu(shares, 1), np.float32)
