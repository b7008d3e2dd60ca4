"""The table of guards: each can be broken."""

from __future__ import annotations

import pytest

from tests.mutations import GUARDS, ROOT, Guard, broken


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.claim)
def test_a_guard_has_its_seam_and_tests(guard: Guard):
    """Broken, its file is other code; and the tests that notice it are there."""
    broken(guard)
    assert [each for each in guard.tests.split() if not (ROOT / each).exists()] == []
