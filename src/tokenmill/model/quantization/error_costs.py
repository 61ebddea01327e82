"""Costs of errors in a matrix's numbers, as its inputs over a text give them: see native/kernel_table.h.

The square of an error counts as much as its input is large. And inputs go together, so that numbers of other inputs can
make up for a part of an error: GPTQ's error feedback (arXiv:2210.17323). By how much is in the inverse of the sums of
products of all pairs of inputs. Pairs count that lie in the same span: that takes memory and time in proportion to a
matrix, and a short text says little of more pairs.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

SPAN = 128
"""Inputs in a span."""
DAMPING = 0.01
"""Added to all sums of squares, as a share of their mean, as in GPTQ: few rows say little."""


class ErrorCosts(msgspec.Struct, frozen=True):
    """The costs of errors in a row's numbers; see native/kernel_table.h.

    Attributes:
        importance: [in_size] float32, above 0, how much the square of an error in each input's number weighs; None: all
            the same.
        feedback: [spans, span, span] float32, by which share of an error later numbers change, see `feedback_of`; None:
            nothing makes up for errors.
    """

    importance: npt.NDArray[np.float32] | None = None
    feedback: npt.NDArray[np.float32] | None = None

    def of_inputs(self, start: int, stop: int) -> ErrorCosts:
        """Return the costs of some of the inputs, with feedback if they are whole spans."""
        importance, feedback = self.importance, self.feedback
        if feedback is not None:
            span = feedback.shape[-1]
            is_whole = start % span == 0 and (stop % span == 0 or (importance is not None and stop == len(importance)))
            feedback = feedback[start // span : -(-stop // span)] if is_whole else None
        return ErrorCosts(None if importance is None else importance[start:stop], feedback)


EVEN = ErrorCosts()
"""All errors cost the same."""


def feedback_of(inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return by which share of an input's error later inputs' numbers change, [spans, span, span] float32.

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
