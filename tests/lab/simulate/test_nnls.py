"""Non-negative least squares against the best of all sets of columns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.seeding import seed_for
from tests.tiers import scaled
from tokenmill.lab.simulate.nnls import nnls

SEED = seed_for(__name__)
NUMBERS = st.integers(-20, 20).map(float)


@st.composite
def systems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    columns = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 8))
    matrix = [draw(st.lists(NUMBERS, min_size=columns, max_size=columns)) for _ in range(rows)]
    target = draw(st.lists(NUMBERS, min_size=rows, max_size=rows))
    scales = np.array([10.0 ** draw(st.integers(-6, 6)) for _ in range(columns)])
    return np.array(matrix) * scales, np.array(target)


def slow_nnls(matrix: np.ndarray, target: np.ndarray) -> float:
    """The least error of all sets of columns whose own least squares need no negative coefficient."""
    best = float(np.linalg.norm(target))
    lengths = np.linalg.norm(matrix, axis=0)
    matrix = matrix / np.where(lengths == 0.0, 1.0, lengths)
    for count in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), count):
            part = matrix[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            if (found >= 0.0).all():
                best = min(best, float(np.linalg.norm(part @ found - target)))
    return best


@seed(SEED)
@settings(max_examples=scaled(100), deadline=None)
@given(systems())
def test_no_set_of_columns_does_better(system: tuple[np.ndarray, np.ndarray]) -> None:
    matrix, target = system
    found = nnls(matrix, target)
    assert (found >= 0.0).all(), f"seed {SEED}"
    error = float(np.linalg.norm(matrix @ found - target))
    assert error <= slow_nnls(matrix, target) * (1 + 1e-9) + 1e-6, f"seed {SEED}"


def test_what_was_made_of_no_negative_numbers_is_found_again() -> None:
    generator = np.random.default_rng(SEED)
    scales = 10.0 ** np.arange(-6, 6)
    wanted = generator.random(12) * (generator.random(12) > 0.4)
    matrix = generator.random((200, 12))
    found = nnls(matrix * scales, matrix @ wanted) * scales
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9, err_msg=f"seed {SEED}")


def test_numbers_that_cannot_be_fitted_are_refused() -> None:
    with pytest.raises(ValueError, match="do not go together"):
        nnls(np.ones((3, 2)), np.ones(2))
    with pytest.raises(ValueError, match="finite"):
        nnls(np.array([[np.nan]]), np.ones(1))
