"""What compilers write, seen from outside: programs whose two descriptors are read by the test, and what killed ones leave."""

from __future__ import annotations

import fcntl
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
from dist_tune.compiler.output import folder_in_use, sweep, temporary_folder
from dist_tune.testing import on_ranks, values
from tests.cases import further
from tests.ranks.kernels import autotuned, launch

pytestmark = [pytest.mark.once, pytest.mark.processes]

PREAMBLE = f"""
import contextlib, logging, os, sys, tempfile, threading, types
for name in ("dist_tune", "dist_tune.compiler"):  # the packages without their __init__, which would import torch
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join({str(Path(__file__).parents[2])!r}, *name.split("."))]
import dist_tune.compiler.output as terminal
from dist_tune.compiler.output import folder_in_use, heard, quiet_terminal
users = contextlib.ExitStack()

def enter():
    users.enter_context(folder_in_use())
    users.enter_context(quiet_terminal.redirected())

def leave():
    users.close()

def state():
    streams = sys.stdout, sys.stderr
    writes = [getattr(each, "write", None) for each in (*streams, *(getattr(each, "buffer", None) for each in streams))]
    return *streams, *writes, len(os.listdir("/proc/self/fd"))
"""


def run(program: str, *flags: str, shell: str = "") -> tuple[str, str]:
    """What a program writes to stdout and stderr; it must end well."""
    command: Any = [sys.executable, *flags, "-c", PREAMBLE + program]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


FAILING = """
handler = logging.StreamHandler()
before = state()
enter()
os.write(2, b"user's C before\\n")

def fails():
    start = quiet_terminal.n_bytes()
    heard("PTX")
    os.write(2, b"MLIR\\n")
    in_main.set()
    go_on.wait()
    taken.append(quiet_terminal.take(start))

in_main, go_on, taken = threading.Event(), threading.Event(), []
thread = threading.Thread(target=fails)
thread.start()
in_main.wait()
print("print")
print("stderr", file=sys.stderr)
handler.handle(logging.makeLogRecord({"msg": "logging"}))
os.write(1, b"C\\n") if "-u" in sys.orig_argv else None
go_on.set()
thread.join()
os.write(2, b"user's C after\\n")
leave()
os.write(2, b"C later\\n")
print("stderr later", file=sys.stderr)
assert state() == before, (state(), before)
assert taken == ["PTX\\nMLIR\\n"], taken
"""


@pytest.mark.parametrize("flags", [(), ("-u",)])
def test_a_failing_compiler_is_not_heard_and_the_user_is(flags: tuple[str, ...]):
    """What it prints on its thread and what comes to descriptor 2 while it works is its own; all else reaches the terminal, in order."""
    stdout, stderr = run(FAILING, *flags)
    assert stdout.split() == ["print", *(["C"] if flags else [])]
    assert stderr.splitlines() == ["stderr", "logging", "user's C before", "user's C after", "C later", "stderr later"]


ODD_USERS = r"""
before = state()
# Text outside of compilations comes out.
enter()
heard("dump of NVPTX")
os.write(2, b"remark\n")
leave()
heard("as ever")
# A stream that the user puts in place meanwhile stays.
original = sys.stderr
enter()
sys.stderr = sys.stdout
leave()
assert sys.stderr is sys.stdout
sys.stderr = original
assert state() == before
# Writes below and above ours.
early = sys.stderr.write  # tqdm looks it up once
enter()
os.write(2, b"C\n")
sys.stderr.buffer.write(memoryview(b"bytes\n"))
early("early\n")
ours = sys.stderr.write
sys.stderr.write = lambda text: ours(text.upper())
print("text", file=sys.stderr)
leave()
print("later", file=sys.stderr)
del sys.stderr.write
# Megabytes are shortened.
enter()
heard("begin" + "x" * 5_000_000)
text = quiet_terminal.take(0)
assert text.startswith("begin") and len(text) == terminal.MAX_CHARS
os.write(2, b"y" * 3_000_000 + b"\n")
leave()
# No room for a file.
make, tempfile.mkdtemp = tempfile.mkdtemp, lambda **options: (_ for _ in ()).throw(OSError(28, "No space left on device"))
enter()
os.write(2, b"MLIR\n")
print("stderr", file=sys.stderr)
leave()
tempfile.mkdtemp = make
assert state() == before
# A descriptor that the user redirects meanwhile stays.
enter()
file = tempfile.TemporaryFile()
os.dup2(file.fileno(), 2)
leave()
print("to the file", file=sys.stderr)
assert os.pread(file.fileno(), 100, 0) == b"to the file\n"
"""


def test_the_terminal_is_the_user_s():
    """What a compilation does not take comes out at its end, and what the user does to streams and descriptors stays."""
    stdout, stderr = run(ODD_USERS)
    assert stdout == "as ever\n"
    expected = ["dump of NVPTX", "remark", "bytes", "early", "TEXT", "C", "LATER", "y" * 3_000_000, "MLIR", "stderr"]
    assert stderr.splitlines() == expected


@pytest.mark.parametrize("shell", ["2>&-", ">&- 2>&-"])
def test_closed_descriptors(shell: str):
    """As of a daemon: nothing to keep, nothing to restore, nothing left open."""
    run("before = state()\nenter()\nheard('PTX') if sys.stderr else None\nleave()\nassert state() == before", shell=shell)


def test_a_compiler_that_ends_the_process_leaves_its_last_words():
    """LLVM aborts on some input: what it wrote is in a file of a folder named after the process."""
    program = PREAMBLE + "enter(); os.write(2, b'UNREACHABLE executed'); print(quiet_terminal.kept_at, flush=True); os.abort()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    path = Path(done.stdout.strip())
    assert path.read_text() == "UNREACHABLE executed"
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("capture", ["fd", "sys"])
def test_under_pytest(capture: str, tmp_path: Path):
    """Each way in which pytest captures goes on working, and gets the user's lines only."""
    test = """
def test_it(CAPTURE):
    before = state()
    enter()
    heard("PTX")
    os.write(2, b"MLIR\\n")
    assert quiet_terminal.take(0) == "PTX\\nMLIR\\n"
    print("print")
    print("stderr", file=sys.stderr)
    leave()
    assert state() == before
    print("later")
    assert CAPTURE.readouterr() == ("print\\nlater\\n", "stderr\\n")
"""
    (tmp_path / "test_it.py").write_text(PREAMBLE + test.replace("CAPTURE", f"cap{capture}"))
    command = [sys.executable, "-m", "pytest", "-q", f"--capture={capture}", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PTX" not in done.stdout + done.stderr
    assert "MLIR" not in done.stdout + done.stderr


# -- what killed processes leave ---------------------------------------------------------------------------------------

MAKE = """
import sys, time
from pathlib import Path
from dist_tune.compiler.output import folder_in_use, temporary_folder
with folder_in_use():
    Path(temporary_folder(), "a.ttir").write_text("module")
    Path(temporary_folder(), "compilers.stderr").write_text(sys.argv[1])
    print(temporary_folder(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("how", "words"), [further(signal.SIGTERM, ""), (signal.SIGKILL, ""), (signal.SIGKILL, "UNREACHABLE executed")])
def test_what_a_killed_process_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals, words: str):
    """Not while it lives; with what a compiler wrote before it crashed it is kept for a day, as are files of other names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dist_tune-notes").write_text("")
    (tmp_path / "dist_tune-mine").mkdir()
    (tmp_path / "dist_tune-mine" / "stderr").touch()  # of a version that held another file
    others = set(tmp_path.iterdir())
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
    if words:
        os.utime(folder / "compilers.stderr", (time.time() - 90_000,) * 2)
        sweep()
    assert set(tmp_path.iterdir()) == others


def test_its_own_folder_is_swept_by_a_process_that_ends_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not while it goes on, nor by another process that sweeps between the making of the folder's file and its lock."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, sweeping = fcntl.flock, list[int]()

    def flock(file: Any, how: int) -> None:
        if not sweeping:
            sweeping.append(1)
            sweep()
        own(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder_in_use():
        assert sweeping
        sweep()
        assert set(tmp_path.iterdir()) == {Path(temporary_folder() or "")}
        sweep(is_own=True)
        assert not set(tmp_path.iterdir())
    with folder_in_use():
        assert temporary_folder()
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
    assert on_ranks(1, _killed_in_ptxas, folder, n_cores, mode="fake", is_dist=False)[0].error == "Died"
    assert [*folder.rglob("*.ptx")]
    values(on_ranks(1, _tuned, folder, mode="fake", is_dist=False))
    assert not [*folder.iterdir()]
