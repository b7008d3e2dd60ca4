"""A log that cannot be written: one warning, and the tuning and its values are as with a log."""

from __future__ import annotations

import errno
import io
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from dist_tune import autotune
from dist_tune.output.log import tuning_log
from dist_tune.settings import Settings
from tests.function_options import BLOCKS, QUICK, quiet
from tests.programs import run_python

pytestmark = pytest.mark.once

ADVICE = "DIST_TUNE_LOG_DIR names another folder"


class _Full(io.StringIO):
    """A file on a disk that becomes full in the midst."""

    def __init__(self, name: str, n_lines: int, error: Exception) -> None:
        super().__init__()
        self.name, self.n_left, self.error = name, n_lines, error

    def write(self, text: str) -> int:
        self.n_left -= 1
        if self.n_left < 0:
            raise self.error
        return super().write(text)

    def close(self) -> None:
        raise self.error


def test_a_disk_that_becomes_full_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The first lines are kept, the terminal goes on, and nothing is raised: by a write or by the close."""
    settings = Settings().model_copy(update={"log_dir": tmp_path})
    full = _Full(str(tmp_path / "full.log"), 1, OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("dist_tune.output.log.open", lambda *args, **kwargs: full, raising=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            full.n_left = 1
            with tuning_log(settings, 0, True) as logger:
                for i in range(5):
                    logger.bind(progress=True).info(f"line {i}")
    assert [str(each.message) for each in warned] == [
        f"dist_tune keeps no log: {full.name} cannot be written ([Errno 28] No space left on device). {ADVICE}"
    ]
    assert capsys.readouterr().err == "".join(f"dist_tune: line {i}\n" for i in range(5)) * 2
    assert full.getvalue().count("line 0") == 2


def test_a_size_limit_costs_one_warning_and_no_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """The first bytes of the log are written, then the system refuses."""
    quiet(monkeypatch, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tuned: Any = autotune(BLOCKS, lambda x: x, **QUICK)(lambda x, block: x)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            assert [tuned(1), tuned(2), tuned(1)] == [1, 2, 1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(tuned.records) == 2
    assert [f"{errno.EFBIG}" in str(each.message) for each in warned] == [True]
    assert (tmp_path / "logs" / "rank-0.log").stat().st_size == 100
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("terminal", ["closed", "none", "raises"])
def test_a_terminal_that_is_gone_costs_nothing(terminal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file has the lines."""
    closed = io.StringIO()
    closed.close()
    gone: Any = {"closed": closed, "none": None, "raises": _Full("", 0, BrokenPipeError())}[terminal]
    monkeypatch.setattr(sys, "stderr", gone)
    with tuning_log(Settings().model_copy(update={"log_dir": tmp_path}), 0, True, is_verbose=True) as logger:
        logger.bind(progress=True).info("tuning f")
    assert "tuning f" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.processes
def test_a_process_without_stderr(tmp_path: Path):
    """Its descriptor is closed and it has no log folder: the warning goes nowhere, the call returns."""
    (tmp_path / "file").touch()
    program = """
import os, sys
os.close(2)
from dist_tune import autotune
f = autotune([{"block": 1}, {"block": 2}], None, n_warmup=0, n_repeat=1, cache=False)(lambda x, block: x)
print(f(3), len(f.records))
"""
    done = run_python("-c", program, cwd=tmp_path, env={"DIST_TUNE_LOG_DIR": str(tmp_path / "file" / "logs"), "PATH": ""})
    assert (done.returncode, done.stdout) == (0, "3 1\n"), done.stderr
