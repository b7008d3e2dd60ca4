"""Warnings name the line of the program that they are about."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dist_tune import autotune
from dist_tune.warn_once import callers_level
from tests.function_options import BLOCKS

pytestmark = pytest.mark.once


def test_a_warning_names_the_programs_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """And none of this package, which says nothing to its reader."""
    monkeypatch.setattr("dist_tune.warn_once._told", set())
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "soon")
    tuned: Any = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(lambda x, block=0: x)
    with pytest.warns(UserWarning, match="DIST_TUNE_DEADLINE_S='soon' cannot be read") as told:
        tuned(3)
    assert {each.filename for each in told if "DEADLINE" in str(each.message)} == {__file__}


def test_a_warning_of_a_thread_of_this_package_has_a_line():
    """There is no caller outside, as of a pool that compiles."""
    monkeypatched = eval("lambda f: f()", {"__name__": "dist_tune.made_up"})
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(monkeypatched, callers_level).result() == 2
