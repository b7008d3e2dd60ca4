"""Files of checked lines: held by one process, damaged anywhere, on a disk that is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache import JournalFile, JournalLine, QuarantinedConfig, is_held, quarantine, read_quarantine
from dist_tune.cache import journal_file as module

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:journal .*damaged lines", "ignore:tuning goes on without")]


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test may be warned anew."""
    monkeypatch.setattr("dist_tune.warn_once._told", set())


def written(path: Path, n: int = 3) -> JournalFile[JournalLine]:
    file = JournalFile(path, JournalLine)
    for k in range(n):
        file.append({"t": "begun", "n": [k], "on": {"site": k}})
    return file


def stop(file: JournalFile[JournalLine], n: int) -> None:
    for _ in range(n):
        file.append({"t": "stop"})


def test_lines_come_back_in_order_and_stay(tmp_path: Path):
    """A second opening adds to them."""
    path = tmp_path / "journals" / "one.jsonl"
    written(path).close()
    again = written(path, 1)
    assert [line.on["site"] for line in again.lines] == [0, 1, 2]
    again.close()
    file = JournalFile(path, JournalLine)
    assert len(file.lines) == 4
    file.close(delete=True)
    assert not path.exists()


@pytest.mark.processes
def test_one_process_and_one_thread_hold_a_file(tmp_path: Path):
    """The others go on without one; a child that was forked meanwhile does not hold it."""
    path = tmp_path / "one.jsonl"
    file = written(path)
    assert not JournalFile(path, JournalLine).is_open
    code = "from pathlib import Path\nfrom dist_tune.cache import JournalFile, JournalLine\n"
    code += f"print(JournalFile(Path({str(path)!r}), JournalLine).is_open)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == "False"
    assert "another process is tuning the same" in other.stderr
    child = os.fork()
    if child == 0:
        os.execvp("sleep", ["sleep", "60"])
    try:
        file.close()
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@given(st.binary(max_size=200), st.integers(0, 200), st.booleans())
def test_any_damage_costs_lines_and_never_raises(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, is_cut: bool):
    """Bytes in the middle, or in place of the end; the next lines are whole."""
    path = tmp_path_factory.mktemp("damage") / "one.jsonl"
    written(path).close()
    content = path.read_bytes()
    path.write_bytes(content[:at] + noise + (b"" if is_cut else content[at:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = JournalFile(path, JournalLine)
    file.append({"t": "stop"})
    file.close()
    again = JournalFile(path, JournalLine)
    assert again.lines[-1].t == "stop"
    assert all(line.t in ("begun", "stop") for line in again.lines)
    again.close()


def test_a_full_disk_costs_the_journal_and_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file is given up at the first line that does not fit."""
    file = written(tmp_path / "one.jsonl")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.write", full)
    with pytest.warns(UserWarning, match="tuning goes on without its journal .*No space left") as told:
        stop(file, 3)
    assert len(told) == 1
    assert not file.is_open


@pytest.mark.parametrize("what", ["file", "link", "fifo", "folder"])
def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path, what: str):
    """A file where the folder should be, and a link, a fifo or a folder where the file should."""
    folder = tmp_path / "journals"
    path = folder / "one.jsonl"
    if what == "file":
        folder.write_text("mine")
    else:
        folder.mkdir()
        target = tmp_path / "target"
        target.write_text("mine")
        path.symlink_to(target) if what == "link" else os.mkfifo(path) if what == "fifo" else path.mkdir()
    with pytest.warns(UserWarning, match="goes on without its journal"):
        assert not JournalFile(path, JournalLine).is_open
    assert (folder if what == "file" else tmp_path / "target").read_text() == "mine"
    with pytest.warns(UserWarning, match="the quarantine of kernel A is not kept"):
        quarantine(path, QuarantinedConfig(kernel="kernel", key="[1]", config="A", rank=0, since=1.0))
    assert read_quarantine(path) == []


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is begun anew, and grows no further than that."""
    monkeypatch.setattr(module, "MAX_BYTES", 400)
    path = tmp_path / "one.jsonl"
    path.write_bytes(b"x" * 500)
    with pytest.warns(UserWarning, match="damaged lines"):
        file = JournalFile(path, JournalLine)
    with pytest.warns(UserWarning, match="larger than 400 bytes"):
        stop(file, 20)
    assert path.stat().st_size <= 400


def test_a_line_that_was_cut_off_is_gone_at_the_next_opening(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    """It is told of never: what comes after it is whole."""
    path = tmp_path / "one.jsonl"
    written(path).close()
    path.write_bytes(path.read_bytes()[:-5])
    for n in (2, 3, 4):
        file = JournalFile(path, JournalLine)
        assert len(file.lines) == n
        stop(file, 1)
        file.close()
    assert not recwarn.list


def test_a_file_has_one_name_in_a_folder_that_has_several(tmp_path: Path):
    """A second opening under another one would release the lock of the first."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    file = written(tmp_path / "folder" / "one.jsonl")
    assert not JournalFile(tmp_path / "link" / "one.jsonl", JournalLine).is_open
    assert is_held(tmp_path / "link" / "one.jsonl")
    file.close()
    assert not is_held(tmp_path / "link" / "one.jsonl")
