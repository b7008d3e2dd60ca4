"""Temporary files of killed processes are deleted by the next tuning of the host; those of live ones, and of others, stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dist_tune.compiler.subprocesses.leftovers import prefix, suffix, sweep
from tests.cases import further

pytestmark = [pytest.mark.once, pytest.mark.processes]

MAKE = """
import signal, tempfile, time
from dist_tune.compiler.subprocesses.leftovers import prefix, suffix
empty = tempfile.NamedTemporaryFile(prefix=prefix("stderr"), suffix=suffix())
crash = tempfile.NamedTemporaryFile(prefix=prefix("stderr"), suffix=suffix())
crash.write(b"UNREACHABLE executed")
crash.flush()
folder = tempfile.TemporaryDirectory(prefix=prefix("ttir"), suffix=suffix())
open(folder.name + "/a.ttir", "w").close()
print(empty.name, crash.name, folder.name, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [further(signal.SIGTERM), signal.SIGKILL])
def test_what_a_killed_process_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals):
    """Not while it lives; and what a compiler wrote before it crashed is kept, as are files of other namespaces and names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [
        tmp_path / name for name in ("dist_tune-1-mine", f"dist_tune-999999999-x-ns{1}", "dist_tune-notes", prefix("mine") + suffix())
    ]
    for path in others:
        path.write_text("")
    command = [sys.executable, "-c", MAKE]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        empty, crash, folder = map(Path, process.stdout.readline().split())
        sweep()
        assert empty.exists()
        assert (folder / "a.ttir").exists()
        process.send_signal(how)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not asked yet
        sweep()
        assert not empty.exists()
        process.wait()
    assert set(tmp_path.iterdir()) == {crash, *others}


def test_a_process_that_ends_itself_deletes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its folders and its empty files, if it says so; what a compiler wrote stays, and so does what it needs while it goes on."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    empty, crash, folder = (tmp_path / f"{prefix(what)}{i}{suffix()}" for i, what in enumerate(("stderr", "stderr", "ttir")))
    empty.touch()
    crash.write_text("UNREACHABLE executed")
    folder.mkdir()
    sweep()
    assert set(tmp_path.iterdir()) == {empty, crash, folder}
    sweep(is_own=True)
    assert set(tmp_path.iterdir()) == {crash}
