"""Temporary files of killed processes are deleted by the next tuning of the host; those of live ones, and of others, stay."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from dist_tune.compiler.leftovers import in_use, sweep, temporary_folder
from dist_tune.testing import on_ranks, values
from tests.cases import further
from tests.ranks.kernels import autotuned, launch

pytestmark = [pytest.mark.once, pytest.mark.processes]

MAKE = """
import sys, time
from pathlib import Path
from dist_tune.compiler.leftovers import in_use, temporary_folder
with in_use():
    Path(temporary_folder(), "a.ttir").write_text("module")
    Path(temporary_folder(), "stderr").write_text(sys.argv[1])
    print(temporary_folder(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("how", "words"), [further(signal.SIGTERM, ""), (signal.SIGKILL, ""), (signal.SIGKILL, "UNREACHABLE executed")])
def test_what_a_killed_process_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals, words: str):
    """Not while it lives; with what a compiler wrote before it crashed it is kept for a day, as are files of other namespaces and names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [tmp_path / name for name in ("dist_tune-1-mine", f"dist_tune-999999999-x-ns{1}", "dist_tune-notes")]
    for path in others:
        path.write_text("")
    command = [sys.executable, "-c", MAKE, words]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        sweep()
        assert (folder / "a.ttir").exists()
        process.send_signal(how)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not asked yet
        sweep()
        assert folder.exists() == bool(words)
        process.wait()
    if words:
        assert (folder / "stderr").read_text() == words
        os.utime(folder / "stderr", (time.time() - 90_000,) * 2)
        sweep()
    assert set(tmp_path.iterdir()) == set(others)


def test_a_process_that_ends_itself_deletes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If it says so; while it goes on it needs its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with in_use():
        sweep()
        assert set(tmp_path.iterdir()) == {Path(temporary_folder())}
        sweep(is_own=True)
        assert not set(tmp_path.iterdir())


def _step(x: torch.Tensor) -> None:
    contextual_autotune(n_repeat=1, n_warmup=0)(lambda: launch(autotuned(blocks=(16, 32)), x))()


def _killed_in_ptxas(rank: int, folder: Path, n_cores: int) -> Any:
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.sched_getaffinity = lambda pid: set(range(n_cores))
    slow = folder.parent / "ptxas"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {triton.knobs.nvidia.ptxas.path} --version\nsleep 3\n')
    slow.chmod(0o755)
    os.environ["TRITON_PTXAS_PATH"] = str(slow)

    def kill() -> None:
        while not list(folder.rglob("*.ptx")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    _step(torch.zeros(64))


def _tuned(rank: int, folder: Path) -> Any:
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    _step(torch.zeros(64))


@pytest.mark.parametrize("n_cores", [1, 8])
def test_files_of_a_compiler_that_was_killed_are_swept(tmp_path: Path, n_cores: int):
    """What Triton gives the assembler, in the rank's own process and in one that compiles for it."""
    (folder := tmp_path / "tmp").mkdir()
    assert shutil.which("sh")
    assert on_ranks(1, _killed_in_ptxas, folder, n_cores, mode="fake", is_dist=False)[0].error == "Died"
    assert [*folder.rglob("*.ptx")]
    values(on_ranks(1, _tuned, folder, mode="fake", is_dist=False))
    assert not [*folder.iterdir()]
