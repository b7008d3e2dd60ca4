"""The rules of conftest.py for tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.programs import ROOT, of_checkout, run_python

TESTS = """
import subprocess, sys
from contextlib import suppress
import pytest

MARKS = ("slow", "processes", "gpu")

@pytest.mark.parametrize("mark", [pytest.param(each, marks=getattr(pytest.mark, each)) for each in MARKS])
def test_start(mark):
    with suppress(AssertionError):
        subprocess.run([sys.executable, "-c", ""])
"""  # noqa: E501
LEFT_OUT = """
import pytest

pytestmark = [pytest.mark.once, pytest.mark.processes]
raise ImportError
"""
OTHER = """
import pytest

@pytest.mark.once
def test_once(): ...

def test_skips():
    pytest.skip("here")
"""


@pytest.mark.processes
def test_the_rules_for_tests_hold(tmp_path: Path):
    """A process fails a test without the mark, also where the code under test takes the error for
    one of its own.

    Tests of GPUs, which no CI runs, need none. A test of ranks that skips has failed. A file whose
    tests are all left out is not imported: its ``pytestmark`` says so, and marks of single tests
    say nothing of the file.
    """
    files = {
        "test_starts.py": TESTS,
        "test_left_out.py": LEFT_OUT,
        "ranks/test_other.py": OTHER,
        "conftest.py": (ROOT / "conftest.py").read_text(),
    }
    (tmp_path / "ranks").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = ["-p", "no:cacheprovider", "-rA", "-m", "not once", "--rootdir=."]
    done = run_python(
        "-m", "pytest", *options, cwd=tmp_path, env={**os.environ, **of_checkout(tmp_path)}
    )
    found = {
        name: outcome
        for outcome, name in re.findall(
            r"^(PASSED|FAILED|ERROR|SKIPPED).*::(\S+)", done.stdout, re.MULTILINE
        )
    }
    starts = {
        "test_start[slow]": "FAILED",
        "test_start[processes]": "PASSED",
        "test_start[gpu]": "PASSED",
    }
    assert found == {**starts, "test_skips": "FAILED"}, done.stdout + done.stderr
    assert "mark it with pytest.mark.processes" in done.stdout
