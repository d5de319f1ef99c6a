"""Limits, and how rows are shared where everybody gets all it may have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretell.spec.budget import FixedBudget
from foretell.spec.seats import limit


def test_limit_leaves_room_for_the_targets_own_token():
    assert limit(5, 63, 100, 100) == (5, 5)
    assert limit(5, 3, 100, 100) == (3, 3)
    assert limit(5, 63, 2, 100) == (5, 2)
    assert limit(5, 63, 100, 4) == (5, 3)
    assert limit(5, 63, 100, 1) == (0, 0)
    assert limit(5, 63, -1, 100) == (0, 0)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(-2, 60))
def test_shares_are_fair(limits: list[int], rows: int):
    given = FixedBudget().share(limits, rows, prefills=False)
    assert all(0 <= g <= most for g, most in zip(given, limits, strict=True))
    assert sum(given) == min(sum(limits), max(0, rows))
    cut = [g for g, most in zip(given, limits, strict=True) if g < most]
    assert not cut or max(given) - min(cut) <= 1


def test_nobody_drafts_while_a_prompt_is_prefilled():
    assert FixedBudget().share([5, 5], 100, prefills=True) == [0, 0]
