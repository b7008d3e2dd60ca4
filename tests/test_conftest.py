"""The rules of conftest.py for tests."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize("mark", ["", "slow", "processes", "gpu"])
def test_a_process_fails_a_test_without_the_mark(mark: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Also where the code under test takes the error for one of its own. Tests of GPUs, which no CI runs, need none."""
    conftest: Any = next(each for each in request.config.pluginmanager.get_plugins() if hasattr(each, "_demand_mark"))
    item = SimpleNamespace(nodeid="a test", path=Path("a.py"), get_closest_marker=lambda name: name == mark)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(conftest, "_running", [item])
        with suppress(AssertionError):
            sys.audit("dist_tune.test_process")
    made = conftest.pytest_runtest_makereport(item)
    next(made)
    with pytest.raises(StopIteration) as ended:
        made.send(SimpleNamespace(outcome="passed", passed=True, skipped=False))
    assert ended.value.value.outcome == ("passed" if mark in ("processes", "gpu") else "failed")


@pytest.mark.parametrize(("expression", "is_ignored"), [("not gpu and not once", True), ("not gpu", None), ("once", None)])
def test_a_file_whose_tests_are_all_left_out_is_not_imported(
    expression: str, is_ignored: bool | None, tmp_path: Path, request: pytest.FixtureRequest
):
    """Its ``pytestmark`` says so; marks of single tests say nothing of the file."""
    conftest: Any = next(each for each in request.config.pluginmanager.get_plugins() if hasattr(each, "_demand_mark"))
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    (tmp_path / "test_file.py").write_text("import pytest\n\npytestmark = [pytest.mark.once, pytest.mark.processes]\n")
    (tmp_path / "test_other.py").write_text("import pytest\n\n@pytest.mark.once\ndef test(): ...\n")
    assert conftest.pytest_ignore_collect(tmp_path / "test_file.py", config) is is_ignored
    assert conftest.pytest_ignore_collect(tmp_path / "test_other.py", config) is None
