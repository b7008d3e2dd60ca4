"""The table of guards follows the code."""

from __future__ import annotations

import pytest

from tests.mutations import GUARDS, ROOT, Guard


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.claim)
def test_a_guard_stands_once_where_the_table_says(guard: Guard):
    """And so do the tests that notice it."""
    assert (ROOT / "dist_tune" / guard.file).read_text().count(guard.old) == 1
    assert guard.old != guard.new
    assert [each for each in guard.tests.split() if not (ROOT / each).exists()] == []
