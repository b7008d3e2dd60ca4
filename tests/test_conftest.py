"""The rules of conftest.py for tests."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.once


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_process_fails_a_test_without_the_mark(is_marked: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Also where the code under test takes the error for one of its own."""
    conftest: Any = next(each for each in request.config.pluginmanager.get_plugins() if hasattr(each, "_demand_mark"))
    item = SimpleNamespace(nodeid="a test", path=Path("a.py"), get_closest_marker=lambda _: is_marked)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(conftest, "_running", [item])
        with suppress(AssertionError):
            sys.audit("dist_tune.test_process")
    made = conftest.pytest_runtest_makereport(item)
    next(made)
    with pytest.raises(StopIteration) as ended:
        made.send(SimpleNamespace(outcome="passed", passed=True, skipped=False))
    assert ended.value.value.outcome == ("passed" if is_marked else "failed")
