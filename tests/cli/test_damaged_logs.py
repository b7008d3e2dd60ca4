"""Log folders with one damaged file: each command shows the other ranks, tells of that one in a line on stderr, and ends with code 3."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_watch import Waits, nothing
from tests.report.stories import events, lines, record, write_story
from tests.report_commands import refusal, run

pytestmark = pytest.mark.once

N_LINES = len(list(events([record(0, 24), record(1, 24)], 1)))


def cut_in_the_middle(file: Path) -> str:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return f", line {content[: len(content) // 2].count(bytes([10])) + 1}: cut off: the rest of rank 1 is left out"


def cut_in_its_first_line(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:40])
    return ", line 1: cut off: rank 1 is left out"


def one_line_of_garbage(file: Path) -> str:
    content = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*content[:7], b"no event\n", *content[7:]]))
    return ", line 8: no event: the rest of rank 1 is left out"


def garbage_and_cut_off(file: Path) -> str:
    content = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*content[:7], b"\xff\xfe\0\n", b"[]\n", *content[7:]])[:-9])
    return ", line 8: no event: the rest of rank 1 is left out"


def binary(file: Path) -> str:
    file.write_bytes(bytes(range(256)) * 64)
    return ", line 1: no event: rank 1 is left out"


def zeros(file: Path) -> str:
    """As a file system leaves a file after a power cut."""
    file.write_bytes(bytes(4096))
    return ", line 1: cut off: rank 1 is left out"


def empty(file: Path) -> str:
    file.write_bytes(b"")
    return ": the file is empty: rank 1 is left out"


def dangling(file: Path) -> str:
    file.unlink()
    file.symlink_to("nothing")
    return ": No such file or directory: rank 1 is left out"


def folder(file: Path) -> str:
    file.unlink()
    file.mkdir()
    return ": Is a directory: rank 1 is left out"


def fifo(file: Path) -> str:
    file.unlink()
    os.mkfifo(file)
    return ": not a regular file: rank 1 is left out"


def another_version(file: Path) -> str:
    file.write_text('{"v":7}\n')
    return ", line 1: written with events version 7, and this dist_tune reads version 1: rank 1 is left out"


def another_version_in_the_middle(file: Path) -> str:
    content = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*content[:7], b'{"v":7}\n', *content[7:]]))
    return ", line 8: written with events version 7, and this dist_tune reads version 1: the rest of rank 1 is left out"


def a_gigabyte(file: Path) -> str:
    os.truncate(file, 2**30)
    return ": 1024 MiB, and at most 256 MiB are read: move it away, and the next tuning begins a new one: rank 1 is left out"


def an_endless_line(file: Path) -> str:
    """As a file system leaves a file that was being written to at a power cut."""
    os.truncate(file, 9 * 2**20)
    return f", line {N_LINES + 1}: cut off: the rest of rank 1 is left out"


DAMAGES = [
    cut_in_the_middle, cut_in_its_first_line, one_line_of_garbage, garbage_and_cut_off, binary, zeros, empty, dangling, folder, fifo,
    another_version, another_version_in_the_middle, a_gigabyte, an_endless_line,
]  # fmt: skip


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    write_story(tmp_path / "logs", 2, 24)
    return tmp_path / "logs"


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_damaged_file_is_told_and_the_other_ranks_are_shown(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], str]
):
    """By each command alike, with and without --json: one line with the file, the line and what is wrong, and exit code 3."""
    Waits(monkeypatch)  # Ctrl-C where a rank's end is missing
    damaged = logs / "rank-1.jsonl"
    told = f"dist-tune: {damaged}{damage(damaged)}"
    commands: list[tuple[str | Path, ...]] = [
        ("report", logs, "-o", tmp_path / "page.html"), ("report", logs, "--text"), ("watch", logs, "--once"), ("watch", logs),
        ("trace", logs, "-o", tmp_path / "trace.json"), ("diff", logs, logs),
    ]  # fmt: skip
    for words in [*commands, *((*each, "--json") for each in commands if each != ("watch", logs))]:
        done = run(*words, code=3)
        of_file = {line for line in done.stderr.splitlines() if "rank-1.jsonl" in line}
        assert len(of_file) == 1, (words, done.stderr)
        assert told in of_file.pop(), words
        assert done.stdout, words
        if "--json" in words and words[0] != "diff":
            assert any("rank-1.jsonl" in note for note in json.loads(done.stdout)["notes"]), words
    assert "rank 3" in (tmp_path / "page.html").read_text()
    assert "rank-1.jsonl" in (tmp_path / "page.html").read_text()
    assert {0, 2, 3} <= {each["pid"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}


def test_a_rank_that_may_not_be_read_is_told(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Its file is another user's."""
    opened = os.open

    def refused(path: str | Path, *args: int) -> int:
        if str(path).endswith("rank-1.jsonl"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", refused)
    line = f"dist-tune: {logs}/rank-1.jsonl: Permission denied: rank 1 is left out"
    assert line in run("report", logs, "--text", code=3).stderr.splitlines()
    assert "  note: step: no events of" not in run("report", logs, "--text", code=3).stdout, "it says why already"


def test_a_folder_of_damaged_files_alone_is_one_line(logs: Path):
    """There is nothing to show, so the command has failed."""
    for rank in range(4):
        (logs / f"rank-{rank}.jsonl").write_text("no event\n")
    for words in (("report", logs), ("watch", logs), ("watch", logs, "--once"), ("trace", logs), ("diff", logs, logs)):
        line = f"dist-tune: {logs}/rank-0.jsonl, line 1: no event: rank 0 is left out, and so are all others"
        assert refusal(*words) == line


def test_a_damaged_file_of_an_earlier_job_with_more_ranks_is_no_damage(logs: Path):
    """The present job has four ranks."""
    (logs / "rank-4.jsonl").write_text("no event\n")
    assert "rank-4" not in run("report", logs, "--text").stderr


def test_a_file_that_is_being_written_is_no_damage_to_a_watch(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """The line that was cut off when it was read is whole half a second later."""
    file = logs / "rank-1.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    Waits(monkeypatch, lambda: file.write_bytes(content), nothing, nothing)
    assert run("watch", logs).stderr == ""


def test_damage_is_told_while_a_watch_goes_on(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Once, as soon as it has stood for two looks; a tuning may last for hours."""
    told = list(events([record(0, 24), record(1, 24)], 0))
    (logs / "rank-0.jsonl").write_bytes(lines(told[:-3]))
    (logs / "rank-1.jsonl").write_bytes(b"no event\n")
    seen: list[str] = []
    monkeypatch.setattr("dist_tune.cli.answering.complain", seen.append)
    lengths: list[int] = []
    Waits(monkeypatch, *[lambda: lengths.append(len(seen))] * 4)
    run("watch", logs, code=3)
    assert lengths == [0, 1, 1, 1]
    assert len(seen) == 1


def test_diff_says_slower_rather_than_left_out(logs: Path, tmp_path: Path):
    """A winner that got slower did so for all ranks."""
    later = tmp_path / "later"
    write_story(later, 2, 24)
    for file in later.iterdir():
        content = file.read_text()
        file.write_text(content.replace('"latency_ms":0.', '"latency_ms":1.'))
    assert "slower" in run("diff", logs, later, code=1).stdout
    empty(later / "rank-1.jsonl")
    assert "rank-1.jsonl" in run("diff", logs, later, code=1).stderr
