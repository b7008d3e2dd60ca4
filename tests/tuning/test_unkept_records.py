"""A record that could not be written is not named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from dist_tune import autotune
from tests.function_options import BLOCKS

pytestmark = pytest.mark.once


def test_a_tuning_whose_record_is_not_kept_names_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`dist-tune show ID` would say that there is no such record."""
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "normal")
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    tuned: Any = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(lambda x, block=0: x)
    tuned(3)
    assert "dist-tune show" in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "file"))
    other: Any = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(lambda x, block=0: x)
    with pytest.warns(UserWarning, match="is not kept and will be repeated"):
        other(3)
    shown = capsys.readouterr().err
    assert "3 tried" in shown
    assert "dist-tune show" not in shown


def test_a_tuning_without_a_log_names_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A warning has said that it keeps none, and where it would."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "normal")
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    for folder, n_named in ((tmp_path / "logs", 1), (tmp_path / "file", 0)):
        monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(folder))
        tuned: Any = autotune(BLOCKS, None, n_warmup=0, n_repeat=1, cache=False)(lambda x, block=0: x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuned(3)
        shown = capsys.readouterr().err
        assert "3 tried" in shown
        assert shown.count("  log: ") == n_named
