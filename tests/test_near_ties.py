"""Answers that a near tie parts are the same; others are not."""

from __future__ import annotations

import pytest

from tests.near_ties import assert_same_but_for_near_ties

FIRST = {5: -0.5, 7: -1.5, 8: -2.0}
TIED = {5: -0.7, 7: -0.7004, 8: -4.0}
TURNED = {5: -0.7005, 7: -0.7, 8: -4.0}
AFTER = {1: -0.1, 2: -3.0, 3: -4.0}


def test_a_near_tie_parts_answers_and_what_comes_after_it_does_not_count() -> None:
    assert assert_same_but_for_near_ties(([5, 5], [FIRST, TIED]), ([5, 5], [FIRST, TIED]), 1e-3)
    assert not assert_same_but_for_near_ties(
        ([5, 5, 5], [FIRST, TIED, FIRST]), ([5, 7, 1], [FIRST, TURNED, AFTER]), 1e-3
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (([7], [{5: -0.6, 7: -0.5, 8: -3.0}]), "7 is not as likely|5 is not as likely"),
        (([5], [{5: -0.6, 7: -1.5, 8: -3.0}]), "token 0: .* 5 is not as likely"),
        (([7], [FIRST]), "no near tie"),
        (([9], [{9: -0.5, 7: -1.5, 8: -2.0}]), "one run only"),
        (([5, 5], [FIRST, FIRST]), "lengths differ"),
    ],
)
def test_all_else_is_a_fault(other: tuple[list[int], list[dict[int, float]]], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        assert_same_but_for_near_ties(([5], [FIRST]), other, 1e-3)
