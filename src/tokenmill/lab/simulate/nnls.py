"""Least squares with coefficients that are not negative: the active-set method of Lawson and Hanson.

"Solving Least Squares Problems" (1974), chapter 23. Enough for tens of columns; scipy is no dependency of this project.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A gradient below this share of the largest possible one is rounding.
TOLERANCE = 1e-12


def nnls(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimizes |matrix @ x - target|.

    Args:
        matrix: [rows, columns].
        target: [rows].

    Raises:
        ValueError: a value is not finite, or the shapes do not match.
    """
    matrix, target = np.asarray(matrix, np.float64), np.asarray(target, np.float64)
    if matrix.ndim != 2 or target.shape != matrix.shape[:1]:
        raise ValueError(f"a matrix of {matrix.shape} and a target of {target.shape} do not go together")
    if not (np.isfinite(matrix).all() and np.isfinite(target).all()):
        raise ValueError("the numbers of a fit must be finite")
    # Columns of equal length: tokens squared stand beside ones.
    lengths = np.sqrt((matrix * matrix).sum(axis=0))
    lengths[lengths == 0.0] = 1.0
    found: Floats = _solve(matrix / lengths, target) / lengths
    return found


def _solve(matrix: Floats, target: Floats) -> Floats:
    num_columns = matrix.shape[1]
    found = np.zeros(num_columns)
    is_free = np.zeros(num_columns, bool)
    limit = TOLERANCE * float(np.sqrt(target @ target)) * max(matrix.shape)
    # Each turn frees one column; no set of free columns comes twice, since each has a smaller error than those before.
    for _ in range(3 * num_columns + 10):
        gradient = matrix.T @ (target - matrix @ found)
        gradient[is_free] = -np.inf
        column = int(gradient.argmax()) if num_columns else 0
        if is_free.all() or gradient[column] <= limit:
            break
        is_free[column] = True
        found = _descend(matrix, target, found, is_free)
    return found


def _descend(matrix: Floats, target: Floats, found: Floats, is_free: npt.NDArray[np.bool_]) -> Floats:
    """Return the best x on the free columns; a column where it would be negative is fixed again, in place."""
    while is_free.any():
        wanted = np.zeros_like(found)
        wanted[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
        is_below = is_free & (wanted <= 0.0)
        if not is_below.any():
            return wanted
        shares = found[is_below] / (found[is_below] - wanted[is_below] + np.finfo(float).tiny)
        found = found + float(shares.min()) * (wanted - found)
        is_free &= found > TOLERANCE * max(1.0, float(np.abs(found).max()))
        found = np.where(is_free, found, 0.0)
    return np.zeros_like(found)
