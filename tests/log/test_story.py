"""The one writer of a tuning: its log, and its lines on the terminal; for their owner alone, and
none is worth a tuning.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import resource
import socket
import stat
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

import dist_tune
from dist_tune import autotune
from dist_tune.log import Story
from dist_tune.settings import Settings
from tests.programs import run_python
from tests.steps import BLOCKS, QUICK, quiet

CLOSURE, LABEL = "m.tune.<locals>.step", "m.k[64,torch.float32]"
ODD = "f\n12:00:00.000 INFO    winner=7\x1b[2J\r\x07\u202e\u2028\x00\udcff"
"""A name with what reads as a second line, with escape sequences and with what UTF-8 cannot hold.
"""
ESCAPED = r"f\n12:00:00.000 INFO    winner=7\x1b[2J\r\x07\u202e\u2028\x00\udcff"


def story_in(folder: Path, *, is_first: bool = False, **options: Any) -> Any:
    """A story that has begun and has no site yet; closed at the end of ``with``."""
    settings = Settings().model_copy(update={"log_dir": folder, "verbosity": "normal", **options})
    return closing(Story(settings, 0, CLOSURE, world_size=2, is_first=is_first))


def lines_of(folder: Path) -> list[str]:
    """Lines of a log behind the time of day, without the header."""
    lines = (folder / "rank-0.log").read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line) for line in lines)
    return [line[13:] for line in lines[3:]]


def written(folder: Path, text: str = "text") -> list[str]:
    """Write a line; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with story_in(folder) as story:
            story.warning(text)
    return [str(each.message) for each in caught]


# -- lines -----------------------------------------------------------------------------------------


def test_a_log_is_added_to(tmp_path: Path):
    """The folder is made; a line is time, level and what is said, taken as it is."""
    folder, odd = tmp_path / "a" / "logs", 'config="{BLOCK} <red>" {} %s'
    for text in ("first", odd):
        with story_in(folder, log_level="DEBUG") as story:
            story.debug("fine")
            story.info(text)
    story.error("too late")
    assert [path.name for path in folder.iterdir()] == ["rank-0.log"]
    fine = "DEBUG   fine"
    assert lines_of(folder) == [fine, "INFO    first", fine, f"INFO    {odd}"]


def test_the_programs_loguru_hears_what_it_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Nothing, down to loguru's lowest level; with a level of ours, lines from that on, as the
    page says. Our file has all in any case, and nothing of the program's.
    """
    heard, asked = list[str](), list[str]()
    ids = [
        logger.add(sys.stderr),
        logger.add(heard.append, level="TRACE"),
        logger.add(asked.append, level=4, filter="dist_tune", format="{extra[level]} {message}"),
    ]
    try:
        with story_in(tmp_path, log_level="DEBUG") as story:
            story.error("theirs %s {}")
            story.debug("too fine")
            logger.critical("the program's")
    finally:
        for each in ids:
            logger.remove(each)
    assert asked == ["ERROR theirs %s {}\n"]
    assert len(heard) == 1
    assert capsys.readouterr().err.count("the program's") >= 1
    assert lines_of(tmp_path) == ["ERROR   theirs %s {}", "DEBUG   too fine"]


def test_the_programs_logger_is_left_as_it_is(tmp_path: Path):
    """It may be copied, and lose all its sinks, while a log is written; it makes no message that
    none of its sinks takes.
    """
    heard, made = list[str](), list[int]()
    logger.remove()
    with story_in(tmp_path) as story:
        story.info("before")
        assert copy.deepcopy(logger) is not logger
        one = logger.add(heard.append, level="INFO")
        logger.opt(lazy=True).debug("{}", lambda: made.append(1))
        logger.remove(one)
        logger.remove()
        story.info("after")
    assert (made, heard, lines_of(tmp_path)) == ([], [], ["INFO    before", "INFO    after"])


def test_a_sink_that_asks_and_fails_costs_its_line_alone(tmp_path: Path):
    def fail(message: object) -> None:
        raise RuntimeError("full")

    one = logger.add(fail, level=0, catch=False)
    try:
        with story_in(tmp_path) as story:
            story.info("text")
    finally:
        logger.remove(one)
    assert lines_of(tmp_path) == ["INFO    text"]


def test_a_folder_may_have_any_name(tmp_path: Path):
    with story_in(tmp_path / "run-{id}-{time}") as story:
        story.info("text")
    assert lines_of(tmp_path / "run-{id}-{time}") == ["INFO    text"]


@pytest.mark.parametrize(("level", "kept"), [("TRACE", "tdiw"), ("INFO", "iw"), ("WARNING", "w")])
def test_the_level_says_what_is_kept(tmp_path: Path, level: str, kept: str):
    with story_in(tmp_path, log_level=level) as story:
        for name in ("trace", "debug", "info", "warning"):
            getattr(story, name)(name[0])
    assert "".join(line[-1] for line in lines_of(tmp_path)) == kept


@pytest.mark.parametrize(
    ("is_first", "verbosity", "shown"),
    [
        (True, "normal", ["push"]),
        (False, "verbose", []),
        (True, "quiet", []),
        (True, "verbose", ["fine", "tuning f"]),
    ],
)
def test_the_first_rank_shows_lines(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_first: bool,
    verbosity: str,
    shown: list[str],
):
    """On stderr, some with another text; the file has them all the same."""
    with story_in(tmp_path, is_first=is_first, verbosity=verbosity) as story:
        story.info("fine")
        story.info("tuning f", shown="push")
    assert capsys.readouterr() == ("", "".join(f"dist_tune: {text}\n" for text in shown))
    assert [line[8:] for line in lines_of(tmp_path)] == ["fine", "tuning f"]


def test_sites_have_names_in_the_log_and_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Also where one label begins with another.

    The step is named without its module on the terminal.
    """
    other = f"{LABEL}#2"
    with story_in(tmp_path, is_first=True, log_level="DEBUG") as story:
        story.site(LABEL, ["B=1"], n_pruned=2)
        story.warning(f"{CLOSURE}: site={LABEL} is near", shown=True)
        story.site(other, ["B=1", "B=2"])
        story.warning(f"site={other} candidate=0 cannot run here", shown=True)
    met = [
        f"DEBUG   site 1 = {LABEL}: 1 config, prune rules took out 2 more",
        f"DEBUG   site 2 = {other}: 2 configs",
    ]
    assert lines_of(tmp_path) == [
        met[0],
        f"WARNING {CLOSURE}: k [64] is near",
        met[1],
        f"WARNING {other} candidate=0 cannot run here",
    ]
    # Two of one name have their labels.
    shown = ["dist_tune: step: k [64] is near", f"dist_tune: {other} candidate=0 cannot run here"]
    assert capsys.readouterr().err.splitlines() == shown


def test_any_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In each file and on the terminal, with the characters escaped."""
    with story_in(tmp_path, is_first=True) as story:
        story.warning(ODD, shown=True)
    assert lines_of(tmp_path)[0] == f"WARNING {ESCAPED}"
    assert capsys.readouterr().err.splitlines() == [f"dist_tune: {ESCAPED}"]


def test_lines_of_several_threads_are_whole(tmp_path: Path):
    """Also the header of the first."""
    with story_in(tmp_path) as story, ThreadPoolExecutor(4) as threads:
        list(threads.map(story.info, ["x" * 40] * 200))
    assert lines_of(tmp_path) == [f"INFO    {'x' * 40}"] * 200


def test_the_header_is_there_once_a_process(tmp_path: Path):
    """Two tunings of one process: one header, with process, versions and command."""
    for text in ("one", "two"):
        assert written(tmp_path, text) == []
    first, versions, command = (tmp_path / "rank-0.log").read_text().splitlines()[:3]
    where = f"rank 0 of 2 on {socket.gethostname()}, pid {os.getpid()}, "
    assert first[13:].startswith(f"INFO    dist_tune {dist_tune.__version__}: {where}")
    assert ", python " in versions
    assert f", torch {torch.__version__}, " in versions
    assert command.endswith(f"  {' '.join(sys.orig_argv)}")
    assert lines_of(tmp_path) == ["WARNING one", "WARNING two"]


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o022, 0o377])
def test_files_are_their_owners_alone(tmp_path: Path, mask: int):
    """Whatever the umask: files have mode 0600, their folder and those above it that were made
    0700.
    """
    before = os.umask(mask)
    try:
        assert written(tmp_path / "a" / "logs") == []
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"a": 0o700, "logs": 0o700, "rank-0.log": 0o600}


ODD_FILES: dict[str, tuple[Any, str]] = {
    "link": (lambda path: path.symlink_to(path.parents[1] / "victim"), os.strerror(errno.ELOOP)),
    "dangling link": (
        lambda path: path.symlink_to(path.parents[1] / "nothing"),
        os.strerror(errno.ELOOP),
    ),
    "fifo": (os.mkfifo, os.strerror(errno.ENXIO)),
    "folder": (Path.mkdir, os.strerror(errno.EISDIR)),
}
"""What stands in the place of the log, and the reason in the warning."""


@pytest.mark.parametrize("what", [*ODD_FILES, "a\0b", "x" * 5000, "\udcff" * 300, "victim/logs"])
def test_what_cannot_be_written_costs_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
):
    """With file, reason and variable; a link is not followed, a fifo not waited for.

    Later tunings say nothing; progress is shown.
    """
    victim, folder = tmp_path / "victim", tmp_path / what
    victim.write_text("mine")
    make, reason = ODD_FILES.get(what, (None, ""))
    if make:
        folder.mkdir()
        make(folder / "rank-0.log")
    (text,) = [*written(folder), *written(folder)]
    assert text.startswith(
        f"dist_tune keeps no log: {folder / 'rank-0.log'} cannot be written: {reason}"
    )
    assert text.endswith(". DIST_TUNE_LOG_DIR names another folder")
    assert (victim.read_text(), (tmp_path / "nothing").exists()) == ("mine", False)
    with story_in(folder, is_first=True) as story:
        story.info("tuning f", shown=True)
    assert capsys.readouterr().err == "dist_tune: tuning f\n"


def test_a_size_limit_costs_one_warning_and_no_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a full disk: the first bytes of the log are written, then the system refuses."""
    quiet(monkeypatch, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tuned: Any = autotune(BLOCKS, lambda x: x, **QUICK)(lambda x, block: x)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            assert [tuned(1), tuned(2), tuned(1)] == [1, 2, 1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = [str(each.message) for each in warned if each.category is UserWarning]
    assert [os.strerror(errno.EFBIG) in text for text in told] == [True]
    assert (len(tuned.records), (tmp_path / "logs/rank-0.log").stat().st_size) == (2, 100)


@pytest.mark.processes
def test_a_process_without_stderr(tmp_path: Path):
    """Its descriptor is closed and it has no log folder: the warning goes nowhere, the call
    returns.
    """
    (tmp_path / "file").touch()
    program = """
import os, sys
os.close(2)
import dist_tune
from dist_tune import autotune
f = autotune([{"block": 1}, {"block": 2}], None, n_warmup=0, n_repeat=1, cache=False)(lambda x, block: x)
print(f(3), len(f.records))
"""  # noqa: E501
    done = run_python(
        "-c",
        program,
        cwd=tmp_path,
        env={"DIST_TUNE_LOG_DIR": str(tmp_path / "file" / "logs"), "PATH": ""},
    )
    assert (done.returncode, done.stdout) == (0, "3 1\n"), done.stderr
