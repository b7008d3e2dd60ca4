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
users = []

def enter():
    users.append(contextlib.ExitStack())
    users[-1].enter_context(folder_in_use())
    users[-1].enter_context(quiet_terminal.redirected())

def leave():
    users.pop().close()

def state():
    streams = sys.stdout, sys.stderr
    writes = [getattr(each, "write", None) for each in (*streams, *(getattr(each, "buffer", None) for each in streams))]
    return *streams, *writes, len(os.listdir("/proc/self/fd"))
"""


def run(program: str, *flags: str, shell: str = "", **options: Any) -> tuple[str, str]:
    """What a program writes to stdout and stderr; it must end well."""
    command: Any = [sys.executable, *flags, "-c", PREAMBLE + program]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
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


PROGRAMS = r"""
# text outside of compilations comes out: 'next\nas ever\n', 'dump of NVPTX\nremark\n'
enter()
heard("dump of NVPTX")
os.write(2, b"remark\n")
print("next")
leave()
heard("as ever")
# the last to leave gives the terminal back: '', 'kept\n'
before = state()
enter(), enter()
leave()
os.write(2, b"kept\n")
leave()
assert state() == before
assert quiet_terminal.take(0) == ""
# a stream that the user puts in place meanwhile stays: '', ''
original, before = sys.stderr, state()
enter()
sys.stderr = sys.stdout
leave()
assert sys.stderr is sys.stdout
sys.stderr = original
assert state() == before
# a descriptor that the user redirects meanwhile stays: '', ''
enter()
file = tempfile.TemporaryFile()
os.dup2(file.fileno(), 2)
leave()
print("to the file", file=sys.stderr)
assert os.pread(file.fileno(), 100, 0) == b"to the file\n"
# no room for a file: '', 'MLIR\nstderr\n'
def full(**options):
    raise OSError(28, "No space left on device")
tempfile.mkdtemp = full
before = state()
enter()
os.write(2, b"MLIR\n")
print("stderr", file=sys.stderr)
leave()
assert state() == before
# megabytes are shortened: '', 'y' * 3_000_000
enter()
heard("begin" + "x" * 5_000_000 + "end")
text = quiet_terminal.take(0)
assert text.startswith("begin") and text.endswith("end\n") and len(text) < terminal.MAX_CHARS + 100
assert "[4800009 characters left out]" in text
os.write(2, b"y" * 3_000_000)
leave()
# writes below and above ours: '', 'bytes\nearly\nTEXT\nC\nLATER\n'
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
"""
"""Each after a line with its name, and what comes to stdout and stderr."""


@pytest.mark.parametrize("case", PROGRAMS.split("\n# ")[1:], ids=lambda each: each.partition(":")[0])
def test_terminal(case: str):
    """Each case by its name."""
    head, _, program = case.partition("\n")
    assert run(program) == eval(head.partition(": ")[2])


@pytest.mark.parametrize("shell", ["2>&-", ">&-", ">&- 2>&-"])
def test_closed_descriptors(shell: str):
    """As of a daemon: nothing to keep, nothing to restore, nothing left open."""
    program = """
before = state()
enter()
heard("PTX") if sys.stderr else None
os.write(2, b"MLIR\\n") if sys.stderr else None
leave()
assert state() == before
"""
    run(program, shell=shell)


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
    Path(temporary_folder(), "stderr").write_text(sys.argv[1])
    print(temporary_folder(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("how", "words"), [further(signal.SIGTERM, ""), (signal.SIGKILL, ""), (signal.SIGKILL, "UNREACHABLE executed")])
def test_what_a_killed_process_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals, words: str):
    """Not while it lives; with what a compiler wrote before it crashed it is kept for a day, as are files of other names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dist_tune-notes").write_text("")
    (tmp_path / "dist_tune-mine").mkdir()
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
        os.utime(folder / "stderr", (time.time() - 90_000,) * 2)
        sweep()
    assert set(tmp_path.iterdir()) == others


def test_a_folder_is_not_swept_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process sweeps at the moment between the making of the folder's file and its lock."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, sweeping = fcntl.flock, list[int]()

    def flock(file: Any, how: int) -> None:
        if not sweeping:
            sweeping.append(1)
            sweep()
        own(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder_in_use():
        folder = Path(temporary_folder() or "")
        assert sweeping
        sweep()
        assert set(tmp_path.iterdir()) == {folder}
    assert not set(tmp_path.iterdir())


def test_a_process_that_ends_itself_deletes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If it says so; while it goes on it needs its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with folder_in_use():
        sweep()
        assert set(tmp_path.iterdir()) == {Path(temporary_folder() or "")}
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
