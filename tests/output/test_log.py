"""The log of a tuning: its own logger, its own file."""

import io
import os
import re
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import loguru
import pytest
import torch
import triton

from dist_tune.output.events import EVENT
from dist_tune.output.log import tuning_log, unwrapped
from dist_tune.output.story import Story
from dist_tune.output.terminal import Terminal
from dist_tune.settings import Settings
from tests.log_lines import lines_of

pytestmark = pytest.mark.once


def settings(folder: Path, **options: Any) -> Settings:
    return Settings().model_copy(update={"log_dir": folder, **options})


def open_files() -> set[str]:
    return {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


def test_each_rank_has_a_file_that_is_added_to(tmp_path: Path):
    """The directory is made; a second tuning continues the story; a line is time, level and what is said."""
    folder = tmp_path / "a" / "logs"
    for text in ("first", "second"):
        with tuning_log(settings(folder), 3, False) as log:
            log.info(text)
    assert [path.name for path in folder.iterdir()] == ["rank-3.log"]
    lines = lines_of(folder / "rank-3.log")
    assert [line.split()[1:] for line in lines] == [["INFO", "first"], ["INFO", "second"]]
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line) for line in lines)


def test_text_is_taken_as_it_is(tmp_path: Path):
    """Braces and tags of a config or an error are no format."""
    with tuning_log(settings(tmp_path), 0, True) as log:
        log.bind(progress=True).info('config="{BLOCK} <red>" {}')
    assert 'config="{BLOCK} <red>" {}' in (tmp_path / "rank-0.log").read_text()


def test_the_program_and_the_tuning_do_not_hear_each_other(tmp_path: Path):
    """A sink of the program's loguru gets no line of ours, our file none of the program's; and its sinks stay."""
    heard = io.StringIO()
    sink = loguru.logger.add(heard, level=0)
    try:
        with tuning_log(settings(tmp_path, log_level="TRACE"), 0, False) as log:
            log.info("ours")
            loguru.logger.info("the program's")
        loguru.logger.info("afterwards")
    finally:
        loguru.logger.remove(sink)
    assert "ours" not in heard.getvalue()
    assert "afterwards" in heard.getvalue()
    assert "the program's" not in (tmp_path / "rank-0.log").read_text()


def test_the_program_s_logging_hears_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """No logger of the standard library gets a line of ours either, whatever its level."""
    caplog.set_level(0)
    with tuning_log(settings(tmp_path), 0, False) as log:
        log.error("ours")
    assert caplog.records == []


def test_two_tunings_do_not_hear_each_other(tmp_path: Path):
    with tuning_log(settings(tmp_path), 0, False) as one, tuning_log(settings(tmp_path), 1, False) as other:
        one.info("one")
        other.info("other")
    assert [" one\n" in (tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)] == [True, False]
    assert [" other\n" in (tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)] == [False, True]


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
    out, err = capsys.readouterr()
    assert (out, err) == ("", "dist_tune: tuning f\n" if shown else "")
    assert [line.split(maxsplit=2)[2] for line in lines_of(tmp_path / "rank-0.log")] == ["quiet", "tuning f"]


@pytest.mark.parametrize("progress", ["0", "1", ""])
def test_the_older_name_of_the_verbosity_costs_a_line_of_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], progress: str
):
    """Once a process and file, with what to write in its place; nothing on the terminal, where it may mean quiet."""
    monkeypatch.setenv("DIST_TUNE_PROGRESS", progress)
    for _ in range(2):
        with warnings.catch_warnings(), tuning_log(settings(tmp_path), 0, True) as log:
            warnings.simplefilter("error")
            log.info("line")
    told = re.findall("INFO    (DIST_TUNE_PROGRESS .*)", unwrapped((tmp_path / "rank-0.log").read_text()))
    assert told == ["DIST_TUNE_PROGRESS is deprecated: set DIST_TUNE_VERBOSITY=quiet, normal or verbose in its place"] * bool(progress)
    assert capsys.readouterr() == ("", "")


def test_a_directory_that_cannot_be_written_costs_the_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A warning that names it, and the tuning goes on with its progress shown."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with warnings.catch_warnings(record=True) as warned, tuning_log(settings(blocked), 0, True) as log:
        log.info("into nothing")
        log.bind(progress=True).info("tuning f")
    assert [f"keeps no log: {blocked} cannot be written" in str(each.message) for each in warned] == [True]
    assert capsys.readouterr().err == "dist_tune: tuning f\n"


def test_the_file_is_closed_after(tmp_path: Path):
    """Also when the tuning ends with an error; what is logged later goes nowhere."""
    path = tmp_path / "rank-0.log"
    with suppress(KeyError), tuning_log(settings(tmp_path), 0, False) as log:
        assert str(path) in open_files()
        raise KeyError
    assert str(path) not in open_files()
    log.error("too late")
    assert "too late" not in path.read_text()


def test_the_first_line_of_a_process_says_where_it_runs(tmp_path: Path):
    """Once a process and file: date, rank, host, process, device, versions and command."""
    for _ in range(2):
        with tuning_log(settings(tmp_path), 2, False) as log:
            log.info("line")
    text = unwrapped((tmp_path / "rank-2.log").read_text())
    run, versions, command, *others = text.splitlines()
    assert re.search(rf"run of \d{{4}}-\d\d-\d\dT\S+: rank 2 of \d+ on {socket.gethostname()}, pid {os.getpid()}, device \S+", run)
    assert all(name in versions for name in ("dist_tune ", "python ", f"torch {torch.__version__}", f"triton {triton.__version__}"))
    assert "command: " in command
    assert len(others) == 2


@pytest.mark.parametrize("text", ["word " * 100, "x" * 1000, "short"])
def test_no_line_is_longer_than_160_characters(tmp_path: Path, text: str):
    """A longer one goes on in indented rows, broken at spaces where there are some, and is read back whole."""
    with tuning_log(settings(tmp_path), 0, False) as log:
        log.info(text.strip())
    rows = (tmp_path / "rank-0.log").read_text().splitlines()
    assert max(map(len, rows)) <= 160
    (line,) = lines_of(tmp_path / "rank-0.log")
    assert line.replace(" ", "").endswith(text.replace(" ", ""))


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
    assert [line.partition("INFO    ")[2] for line in lines[:-1]] == (
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
