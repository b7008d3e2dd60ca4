"""Input that commands cannot use: one line with the reason, and what was passed over is told."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dist_tune.cache.store import Cache
from dist_tune.cli.main import main
from tests.cached_records import record
from tests.report.stories import events, lines, write_story
from tests.report.stories import record as story_record
from tests.report_commands import refusal, run

pytestmark = pytest.mark.once

CUT_OFF = re.compile(r"dist-tune: \S+/rank-0\.jsonl, line \d+: cut off: the rest of rank 0 is left out")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    write_story(tmp_path / "logs", 2, 24)
    return tmp_path / "logs"


@pytest.fixture
def cut(logs: Path) -> Path:
    """Logs of which one ends within a line, as of a job that was killed."""
    file = logs / "rank-0.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    return logs


@pytest.fixture
def sealed(logs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is another user's."""

    def refused(name: str, function: Any) -> None:
        def call(path: Any = ".", *args: Any) -> Any:
            if str(path).startswith(str(logs)):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args)

        monkeypatch.setattr(os, name, call)

    refused("scandir", os.scandir)
    refused("listdir", os.listdir)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *args, **kwargs: not str(path).startswith(str(logs)) and access(path, *args, **kwargs))
    return logs


@pytest.mark.parametrize("words", [("report", "--text"), ("watch",), ("watch", "--once"), ("trace",)], ids=" ".join)
def test_a_folder_that_may_not_be_read_is_one_line(sealed: Path, words: tuple[str, ...]):
    """And no lecture on the usage, which was right."""
    assert refusal(words[0], sealed, *words[1:]) == f"dist-tune: {sealed}: Permission denied"


def test_diff_of_a_folder_that_may_not_be_read_is_one_line(sealed: Path, tmp_path: Path):
    assert refusal("diff", sealed, tmp_path) == f"dist-tune: {sealed}: Permission denied"


@pytest.mark.parametrize("command", ["report", "trace"])
def test_an_output_that_is_no_file_is_left_alone(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    """A fifo or a device is not replaced by a file, an empty name is the working directory, and a link keeps leading to its file."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    assert refusal(command, logs, "-o", "fifo") == "dist-tune: fifo cannot be written: it is no regular file"
    assert Path("fifo").is_fifo()
    assert refusal(command, logs, "-o", "") == "dist-tune: . cannot be written: Is a directory"
    Path("link").symlink_to("linked")
    run(command, logs, "-o", "link")
    assert (Path("link").is_symlink(), Path("linked").stat().st_size > 1000) == (True, True)


@pytest.mark.parametrize("words", [["cache", "merge"], ["cache", "export"]], ids=" ".join)
def test_a_file_that_may_not_be_read_is_no_error_of_usage(sealed: Path, cache: Cache, words: list[str], capsys: pytest.CaptureFixture[str]):
    cache.store(record())
    assert main([*words, str(sealed / "rank-0.jsonl")]) == 1
    assert "Usage" not in "".join(capsys.readouterr())


def test_a_cache_that_is_no_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where a command reads it for an id."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "file"))
    for words in (("report", "gemm"), ("diff", "gemm", "other")):
        assert refusal(*words).endswith("/file is not a folder: set DIST_TUNE_CACHE_DIR to the folder of the records")


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["cache", "path"], ["cache", "ls", "--json"], ["report", "--text"]], ids=" ".join
)
def test_an_answer_that_finds_a_full_disk_is_one_line(
    logs: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """And not half a table with exit code 0, nor a traceback, nor a second complaint when Python ends."""
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(logs))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(words) == 1
        full.write("more")
    assert capsys.readouterr().err == "dist-tune: stdout: No space left on device\n"


def test_a_diff_that_finds_a_full_disk_does_not_say_slower(logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Its exit code is 2, because 1 says that a winner got slower."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["diff", str(logs), str(logs)]) == 2
    assert capsys.readouterr().err == "dist-tune: stdout: No space left on device\n"


def test_streams_that_the_shell_has_closed_are_nothing_to_fail_of(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """`dist-tune cache ls >&-`, for its exit code."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert main(["cache", "ls"]) == 0
    assert main(["show", "nothing"]) == 1


def test_a_folder_of_an_odd_name_is_named_so_that_a_shell_takes_it(logs: Path, tmp_path: Path):
    """Quoted in a command to copy, and without escape sequences for the terminal."""
    spaced = logs.rename(tmp_path / "my logs")
    assert f"dist-tune report '{spaced}' tells more" in run("watch", spaced).stdout
    odd = spaced.rename(tmp_path / "\x1b[31mred")
    for words in (("watch", odd), ("report", odd, "-o", odd / "page.html"), ("trace", odd, "-o", odd / "trace.json")):
        assert "\x1b" not in run(*words).stdout


def test_two_jobs_that_write_to_one_folder_at_once_are_told(tmp_path: Path):
    """Their events are mixed, and no figure of them is to be trusted; a closure of the same name in one process is no second job."""
    told = list(events([story_record(0, 8)], 0, 1))
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told + told[8:]))
    mixed = "two jobs have written to this folder at once, and their events are mixed: set DIST_TUNE_LOG_DIR for each"
    assert f"note: {mixed}" in run("report", tmp_path, "--text").stdout
    assert run("watch", tmp_path, "--once").stdout.splitlines()[-1] == mixed
    last_run = next(each for each in reversed(told) if each.kind == "replay")
    (tmp_path / "rank-0.jsonl").write_bytes(lines([*told, last_run, *told[1:]]))
    assert "two jobs" not in run("report", tmp_path, "--text").stdout


def test_a_kernel_whose_records_are_damaged_is_not_called_unknown(cache: Cache, capsys: pytest.CaptureFixture[str]):
    """No record is left, and the reason stands above."""
    path = cache.store(record())
    assert path is not None
    path.write_text("")
    assert main(["show", "gemm"]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last == f"dist-tune: nothing is called 'gemm': there are no records that can be read in {cache.folder}"


def test_what_is_passed_over_is_told_beside_a_trace_and_a_comparison(cut: Path, tmp_path: Path):
    """On stderr, because stdout is the answer; the text of a report and JSON have it among their notes, too."""
    for words in (("trace", cut, "-o", tmp_path / "trace.json"), ("diff", cut, cut), ("watch", cut, "--once"), ("report", cut, "--text")):
        assert any(map(CUT_OFF.fullmatch, run(*words, code=3).stderr.splitlines())), words
    assert re.search(
        r"note: \S+/rank-0\.jsonl, line \d+: cut off: the rest of rank 0 is left out", run("report", cut, "--text", code=3).stdout
    )
    told = json.loads(run("trace", cut, "-o", tmp_path / "trace.json", "--json", code=3).stdout)
    assert any(CUT_OFF.fullmatch(f"dist-tune: {note}") for note in told["notes"])


@pytest.mark.parametrize(
    ("n_events", "schema", "reason"),
    [(-3, 3, "no site has its winner yet"), (10_000, 2, "Value error, written with schema 2, and this dist_tune reads schema 3")],
)
def test_tunings_without_a_record_are_not_called_absent(tmp_path: Path, n_events: int, schema: int, reason: str):
    """They have not ended, or their records are of another dist_tune."""
    told = list(events([story_record(0, 8)], 0, 1))[:n_events]
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told).replace(b'"schema_version":3', b'"schema_version":%d' % schema))
    done = run("diff", tmp_path, tmp_path, code=2)
    assert done.stderr.splitlines()[-1] == f"dist-tune: the tunings in {tmp_path} have no record that can be read: {reason}"


def test_silence_of_months_is_not_told_in_seconds(cut: Path):
    """A tuning of 2026-03-01 that was killed."""
    shown = run("watch", cut, "--once", code=3).stdout
    assert " d ago" in shown
    assert max((len(word) for word in shown.split() if word.isdecimal()), default=0) < 6


def test_a_watch_whose_reader_has_gone_ends(cut: Path, monkeypatch: pytest.MonkeyPatch):
    """As ``| head -1`` goes, while the tuning may run for hours."""
    seconds = iter([5.0, 5.0])
    monkeypatch.setattr("time.sleep", lambda _: next(seconds))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["watch", str(cut)]) == 0
    assert len(list(seconds)) == 2
