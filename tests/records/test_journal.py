"""The file of a journal: held by one process, damaged anywhere, on a disk that is full; and what
SIGTERM leaves in it.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from dist_tune.records import Journal, QuarantinedConfig, quarantine, read_quarantine
from dist_tune.records import journal as module
from tests.programs import run_python
from tests.records.test_store import warned

pytestmark = pytest.mark.filterwarnings("ignore:tuning goes on without", "ignore:journal")


def line(site: int) -> bytes:
    return b'{"v": 2, "kind": "died", "site": "%d", "deaths": {}}' % site


def held(path: Path, *sites: int) -> list[int]:
    """Sites of what a file held when it was opened; a line for each of these is written to it."""
    file = Journal(path)
    for each in sites:
        file.add("died", site=f"{each}", deaths={})
    file.close()
    return [int(each.site) for each in file.lines if each.kind == "died"]


def test_lines_come_back_in_order_and_stay(tmp_path: Path):
    """A second opening adds to them."""
    path = tmp_path / "journals" / "one.jsonl"
    assert held(path, 1, 2) == []
    assert held(path, 3) == [1, 2]
    file = Journal(path)
    assert len(file.lines) == 3
    file.close(delete=True)
    assert not path.exists()


def test_a_line_with_a_time_that_is_no_number_is_left_out(tmp_path: Path):
    """It would cost all that follows. A reason may speak of such numbers."""
    file = Journal(tmp_path / "one.jsonl")
    for ms in (float("nan"), float("inf"), 1.0):
        file.add("agreed", site="x", times={0: ((ms, 1.0, 0.0), 1)})
    reason = "rank 0: 3 of 4 are NaN, and Infinity is one"
    file.add("dropped", site="x", candidate=0, failure="wrong result", reason=reason)
    file.close()
    file = Journal(tmp_path / "one.jsonl")
    file.close()
    assert [each.kind for each in file.lines] == ["agreed", "dropped"]


def test_a_journal_is_given_up_after_two_weeks(tmp_path: Path):
    """The next one that is opened beside it deletes it."""
    for name, days in (("old", 15), ("young", 13)):
        (tmp_path / f"{name}.jsonl").write_bytes(line(1) + b"\n")
        os.utime(tmp_path / f"{name}.jsonl", (time.time() - days * 86400,) * 2)
    held(tmp_path / "one.jsonl")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one.jsonl", "young.jsonl"]


def test_a_damaged_line_ends_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One warning; what comes later is written in its place.

    A large file is not read to its end: what is beyond is measured again.
    """
    path, large = tmp_path / "one.jsonl", tmp_path / "large.jsonl"
    path.write_bytes(line(1) + b"\ndamaged\n" + line(2) + b"\ncut o")
    large.write_bytes((line(1) + b"\n") * 2)
    with pytest.warns(UserWarning, match="its 2. line is damaged"):
        assert held(path, 3) == [1]
    assert held(path) == [1, 3]
    monkeypatch.setattr(module, "MAX_BYTES", 80)
    with pytest.warns(UserWarning, match="its 2. line is damaged"):
        assert held(large) == [1]


def test_a_file_system_without_locks_keeps_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And no other job is waited for because of it."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with pytest.warns(
        UserWarning, match="tuning goes on without its journal: .*No locks available"
    ):
        file = Journal(tmp_path / "one.jsonl")
    assert (file.is_over, file.is_taken) == (True, False)


@pytest.mark.processes
def test_one_process_holds_a_file(tmp_path: Path):
    """Another has none, and knows why; a child that was forked meanwhile does not hold it."""
    path = tmp_path / "one.jsonl"
    file = Journal(path)
    code = (
        "from pathlib import Path\nfrom dist_tune.records import Journal\none ="
        f" Journal(Path({str(path)!r}))\n"
    )
    code += "print(one.is_over, one.is_taken)"
    other = run_python("-c", code)
    assert (other.stdout.strip(), other.stderr) == ("True True", "")
    child = os.fork()
    if child == 0:
        os.execvp("sleep", ["sleep", "300"])
    try:
        file.close()
        assert run_python("-c", code).stdout.strip() == "False False"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.processes
def test_sigterm_ends_a_process_as_before_and_leaves_its_stacks(tmp_path: Path):
    """Also one that is inside C code; a handler of the program's is called, and stays."""
    code = f"""
import re, signal, threading
from pathlib import Path
from dist_tune.records import Journal
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
journal = Journal(Path({str(tmp_path / "one.jsonl")!r}))
signal.raise_signal(signal.SIGTERM)
journal.close()
assert heard == [1]
signal.raise_signal(signal.SIGTERM)
assert heard == [1, 1]
signal.signal(signal.SIGTERM, signal.SIG_DFL)
journal = Journal(Path({str(tmp_path / "two.jsonl")!r}))
threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)).start()
threading.Event().wait()
"""  # noqa: E501
    assert run_python("-c", code, cwd=tmp_path).returncode == -signal.SIGTERM
    for name in ("one", "two"):
        assert (tmp_path / f"{name}.jsonl").read_text().count("(most recent call first)") >= 1


def test_a_full_disk_costs_the_journal_and_one_warning(tmp_path: Path):
    """The file is given up at the first line that does not fit: here of a process that may write no
    longer files.
    """
    file, limits = Journal(tmp_path / "one.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with warned("tuning goes on without its journal: "):
            for _ in range(2):
                file.add("attempt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.is_over


@pytest.mark.parametrize("kind", ["below a file", "link", "fifo", "folder"])
def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path, kind: str):
    """A file where the folder should be, and a link, a fifo or a folder where the file should."""
    target, path = tmp_path / "target", tmp_path / "journals" / "one.jsonl"
    target.write_text("mine")
    path.parent.mkdir()
    if kind == "below a file":
        path = target / "one.jsonl"
    elif kind == "link":
        path.symlink_to(target)
    else:
        (os.mkfifo if kind == "fifo" else os.mkdir)(path)
    with pytest.warns(
        UserWarning,
        match="tunings are not kept" if kind == "below a file" else "goes on without its journal",
    ):
        assert Journal(path).is_over
    with pytest.warns(UserWarning, match="the quarantine of kernel A is not kept"):
        quarantine(
            path, QuarantinedConfig(kernel="kernel", key="[1]", config="A", rank=0, since=1.0)
        )
    assert (target.read_text(), read_quarantine(path)) == ("mine", [])
