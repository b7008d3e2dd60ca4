"""The log of a tuning: what its file and the terminal hold, and that neither is worth a tuning."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import socket
import stat
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune
from dist_tune.output.events import EVENT
from dist_tune.output.log import tuning_log
from dist_tune.output.story import Story
from dist_tune.output.terminal import Terminal
from dist_tune.settings import Settings
from tests.function_options import BLOCKS, QUICK, quiet
from tests.log_lines import lines_of
from tests.programs import run_python

pytestmark = pytest.mark.once

ADVICE = "DIST_TUNE_LOG_DIR names another folder"
FORGED = "f\n12:00:00.000 INFO    winner=7\x1b[2J\r\x07\u202e\x00"
"""A name with what reads as a second event, and with escape sequences."""


def settings(folder: Path, **options: Any) -> Settings:
    return Settings().model_copy(update={"log_dir": folder, **options})


def log_once(folder: Path, text: str = "line") -> list[str]:
    """Log a line; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tuning_log(settings(folder), 0, False) as log:
            log.info(text)
    return [str(each.message) for each in caught]


# -- lines -----------------------------------------------------------------------------------------------------------


def test_each_rank_has_a_file_that_is_added_to(tmp_path: Path):
    """The directory is made; a second tuning continues the story; a line is time, level and what is said, taken as it is."""
    folder = tmp_path / "a" / "logs"
    for text in ("first", 'config="{BLOCK} <red>" {} %s'):
        with tuning_log(settings(folder), 3, False) as log:
            log.info(text)
    log.error("too late")
    assert [path.name for path in folder.iterdir()] == ["rank-3.log"]
    lines = lines_of(folder / "rank-3.log")
    assert [line.split(maxsplit=1)[1] for line in lines] == ["INFO    first", 'INFO    config="{BLOCK} <red>" {} %s']
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line) for line in lines)


def test_the_program_s_logging_hears_what_it_asks_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Nothing, whatever the level of its root; once the logger "dist_tune" has one, lines from that on. Our file has all in any case."""
    caplog.set_level(0)
    with tuning_log(settings(tmp_path), 0, False) as log:
        log.error("unasked")
        with caplog.at_level(logging.INFO, "dist_tune"):
            log.info("asked %s")
            log.debug("too fine")
        logging.getLogger("theirs").info("the program's")
    assert [each.getMessage() for each in caplog.records if each.name == "dist_tune"] == ["asked %s"]
    assert [line[21:] for line in lines_of(tmp_path / "rank-0.log")] == ["unasked", "asked %s", "too fine"]


@pytest.mark.parametrize(("level", "kept"), [("TRACE", "tdiw"), ("DEBUG", "diw"), ("INFO", "iw"), ("WARNING", "w")])
def test_the_level_says_what_is_kept(tmp_path: Path, level: str, kept: str):
    with tuning_log(settings(tmp_path, log_level=level), 0, False) as log:
        for name in ("trace", "debug", "info", "warning"):
            getattr(log, name)(name[0])
    assert "".join(line[-1] for line in lines_of(tmp_path / "rank-0.log")) == kept


@pytest.mark.parametrize(("is_first", "verbosity", "shown"), [(True, None, True), (False, "normal", False), (True, "quiet", False)])
def test_the_first_rank_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_first: bool, verbosity: str, shown: bool):
    """Lines meant for it, on stderr, and in the file all the same."""
    with tuning_log(settings(tmp_path, verbosity=verbosity), 0, is_first) as log:
        log.info("quiet")
        log.bind(progress=True).info("tuning f")
    assert capsys.readouterr() == ("", "dist_tune: tuning f\n" if shown else "")
    assert [line[21:] for line in lines_of(tmp_path / "rank-0.log")] == ["quiet", "tuning f"]


def test_the_first_line_of_a_process_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once a process and file: date, rank, host, process, device, versions and command; and that a variable has another name now."""
    monkeypatch.setenv("DIST_TUNE_PROGRESS", "0")
    for _ in range(2):
        log_once(tmp_path)
    run, versions, command, renamed, *others = (tmp_path / "rank-0.log").read_text().splitlines()
    assert re.search(rf"run of \d{{4}}-\d\d-\d\dT\S+: rank 0 of \d+ on {socket.gethostname()}, pid {os.getpid()}, device \S+", run)
    assert all(name in versions for name in ("dist_tune ", "python ", f"torch {torch.__version__}", f"triton {triton.__version__}"))
    assert "command: " in command
    assert renamed.endswith("DIST_TUNE_PROGRESS is deprecated: set DIST_TUNE_VERBOSITY=quiet, normal or verbose in its place")
    assert len(others) == 2


@pytest.mark.parametrize(("level", "label"), [("INFO", "site 2 "), ("WARNING", "site=k[64]{code=1} ")])
def test_sites_go_by_the_numbers_that_the_log_explains(tmp_path: Path, level: str, label: str):
    """Also where one label begins with another; the event keeps the label, as does a log that leaves out what explains numbers."""
    story = Story("f, call 1", 1, tmp_path, 0, Terminal("f", is_shown=False))
    with tuning_log(settings(tmp_path, log_level=level), 0, False, story=story) as log:
        story.begin("f", log, {})
        for name in ("k[64]", "k[64]{code=1}"):
            story.site(name, ("k", "[64]"), ["B=1"])
        log.warning("site=k[64]{code=1} candidate=0 cannot run here")
    story.close()
    lines = lines_of(tmp_path / "rank-0.log")
    assert lines[-1].endswith(f"{label}candidate=0 cannot run here")
    assert [line[21:] for line in lines[:-1]] == (
        ["site 1 = k[64]: 1 config", "site 2 = k[64]{code=1}: 1 config"] if level == "INFO" else []
    )
    events = [EVENT.validate_json(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [each.text for each in events if each.kind == "message"] == ["site=k[64]{code=1} candidate=0 cannot run here"]


def test_the_terminal_names_sites_and_closures_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A label of 60 characters is for the log, which has it whole; a line may have another text for the terminal."""
    monkeypatch.delenv("DIST_TUNE_PROGRESS", raising=False)
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "normal")
    closure, label = "kernels.cases.tune.<locals>.step", "m.push_gemm[64,triton.language.bfloat16,torch.int64]"
    story = Story(f"{closure}, call 1", 1, tmp_path, 0, Terminal(closure, is_shown=True))
    with tuning_log(settings(tmp_path), 0, is_first=True, story=story) as log:
        story.begin(closure, log, {})
        story.site(label, ("m.push_gemm", "[64,triton.language.bfloat16,torch.int64]"), ["a"])
        log.bind(progress=True).warning(f"site={label} is tuned: it differs in source")
        log.bind(progress=f"closure={closure} acts in place on x (32 MiB)").info(f"closure={closure} acts in place on x (33554432 bytes)")
    told = capsys.readouterr().err.splitlines()
    assert told == ["dist_tune: push_gemm [64, bf16] is tuned: it differs in source", "dist_tune: step acts in place on x (32 MiB)"]
    lines = lines_of(tmp_path / "rank-0.log")
    assert f"site 1 = {label}: 1 config" in lines[0]
    assert lines[-1].endswith(f"closure={closure} acts in place on x (33554432 bytes)")


def test_lines_of_several_threads_are_whole(tmp_path: Path):
    """Also the header of the first."""
    with tuning_log(settings(tmp_path), 0, False) as log, ThreadPoolExecutor(4) as threads:
        list(threads.map(log.info, ["x" * 40] * 200))
    lines = lines_of(tmp_path / "rank-0.log")
    assert len(lines) == 200
    assert all(re.fullmatch(r"[\d:.]{12} INFO    x{40}", line) for line in lines)


# -- text of any origin ----------------------------------------------------------------------------------------------


def test_a_name_begins_no_line_and_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In the file and on the terminal: one line each, with the characters escaped, also those that UTF-8 cannot hold."""
    with tuning_log(settings(tmp_path), 0, True) as log:
        log.bind(progress=True).info(FORGED + "\udcff")
    escaped = r"f\n12:00:00.000 INFO    winner=7\x1b[2J\r\x07\u202e\x00\udcff"
    assert lines_of(tmp_path / "rank-0.log")[-1][13:] == f"INFO    {escaped}"
    assert capsys.readouterr().err == f"dist_tune: {escaped}\n"


# -- files -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("what", ["link", "dangling link", "fifo", "folder"])
def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path, what: str):
    """One warning with the reason and the variable; a link is not followed, and a fifo not waited for."""
    victim, path = tmp_path / "victim", tmp_path / "logs" / "rank-0.log"
    path.parent.mkdir(0o700)
    if "link" in what:
        path.symlink_to(victim if what == "link" else tmp_path / "nothing")
    else:
        os.mkfifo(path) if what == "fifo" else path.mkdir()
    victim.write_text("mine")
    (text,) = log_once(path.parent)
    reason = {"fifo": "not a regular file", "folder": os.strerror(errno.EISDIR)}.get(what, os.strerror(errno.ELOOP))
    assert text == f"dist_tune keeps no log: {path} cannot be written: {reason}. {ADVICE}"
    assert victim.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


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


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\udcff" * 300, "file/logs"])
def test_an_impossible_folder_costs_the_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str):
    """One warning that names the file; progress is shown."""
    (tmp_path / "file").write_text("")
    (text,) = log_once(tmp_path / path)
    assert "dist_tune keeps no log: " in text
    with tuning_log(settings(tmp_path / path), 0, True) as log:
        log.bind(progress=True).info("tuning f")
    assert capsys.readouterr().err == "dist_tune: tuning f\n"


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
    assert [os.strerror(errno.EFBIG) in str(each.message) for each in warned] == [True]
    assert (tmp_path / "logs" / "rank-0.log").stat().st_size == 100
    assert capfd.readouterr().err == ""


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
