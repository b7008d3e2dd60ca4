"""The place of the log: for its owner alone, and never through a link, a FIFO or a device."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pytest

from dist_tune.output.log import tuning_log
from dist_tune.settings import Settings
from tests.log_lines import lines_of

pytestmark = pytest.mark.once

ADVICE = "DIST_TUNE_LOG_DIR names another folder"


def log_once(folder: Path, text: str = "line") -> list[str]:
    """Log a line; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tuning_log(Settings().model_copy(update={"log_dir": folder}), 0, False) as log:
            log.info(text)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("mask", [0, 0o022, 0o377])
def test_logs_are_their_owners_alone(tmp_path: Path, mask: int):
    """Whatever the umask: the file has mode 0600, its folder and those above it that were made 0700."""
    before = os.umask(mask)
    try:
        assert log_once(tmp_path / "a" / "logs") == []
    finally:
        os.umask(before)
    paths = (tmp_path / "a", tmp_path / "a" / "logs", tmp_path / "a" / "logs" / "rank-0.log")
    assert [stat.S_IMODE(each.stat().st_mode) for each in paths] == [0o700, 0o700, 0o600]


def test_a_symbolic_link_is_not_followed(tmp_path: Path):
    """One warning; the file that it leads to is untouched, and none is made where it leads to nothing."""
    (tmp_path / "victim").write_text("mine")
    for name, target in (("one", "victim"), ("two", "nothing")):
        (tmp_path / name).mkdir(0o700)
        (tmp_path / name / "rank-0.log").symlink_to(tmp_path / target)
        (text,) = log_once(tmp_path / name)
        assert text == f"dist_tune keeps no log: {tmp_path / name / 'rank-0.log'} cannot be written (it is a symbolic link). {ADVICE}"
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_fifo_does_not_block(tmp_path: Path, has_reader: bool):
    """With and without a reader: one warning, and nothing is written into it."""
    folder = tmp_path / "logs"
    folder.mkdir(0o700)
    os.mkfifo(folder / "rank-0.log")
    reader = os.open(folder / "rank-0.log", os.O_RDONLY | os.O_NONBLOCK) if has_reader else -1
    try:
        assert len(log_once(folder)) == 1
        assert not has_reader or os.read(reader, 100) == b""
    finally:
        if has_reader:
            os.close(reader)


def test_a_folder_that_others_can_write_is_told_once(tmp_path: Path):
    """With its mode, the remedy and the variable; the log is written all the same."""
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(0o777)
    (text,) = log_once(folder)
    for part in (str(folder), "mode 0777", "chmod go-w", "DIST_TUNE_LOG_DIR"):
        assert part in text
    assert log_once(folder) == []
    assert len(lines_of(folder / "rank-0.log")) == 2


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\udcff" * 300])
def test_an_impossible_folder_costs_the_log_alone(tmp_path: Path, path: str):
    assert len(log_once(tmp_path / path)) == 1
