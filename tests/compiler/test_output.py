"""Compilers kept off the terminal, seen from outside: programs whose two descriptors are read by the test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.once, pytest.mark.processes]

PREAMBLE = f"""
import contextlib, logging, os, sys, tempfile, threading, types
for name in ("dist_tune", "dist_tune.compiler"):  # the packages without their __init__, which would import torch
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join({str(Path(__file__).parents[2])!r}, *name.split("."))]
import dist_tune.compiler.output as terminal
from dist_tune.compiler.leftovers import in_use
quiet, heard = terminal.quiet_terminal, terminal.heard
users = []

def enter():
    users.append(contextlib.ExitStack())
    users[-1].enter_context(in_use())
    users[-1].enter_context(quiet.redirected())

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


FAILING = """
handler = logging.StreamHandler()
before = state()
enter()
os.write(2, b"user's C before\\n")

def fails():
    with quiet.capture() as capture:
        heard("PTX")
        os.write(2, b"MLIR\\n")
        in_main.set()
        go_on.wait()
        taken.append(quiet.take(capture, with_descriptor=True))

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


def test_what_nobody_takes_comes_out():
    """Of a compilation that does not fail: what it prints at its end, what it writes to descriptor 2 when all have left."""
    program = """
enter()
with quiet.capture():
    heard("dump of NVPTX")
    os.write(2, b"remark\\n")
print("next")
leave()
"""
    assert run(program) == ("dump of NVPTX\nnext\n", "remark\n")


def test_the_last_to_leave_gives_the_terminal_back():
    """Two tunings in two threads; and a thread that listens longer than both is kept quiet to its end, and takes nothing of the next."""
    program = """
before = state()
enter(), enter()
leave()
os.write(2, b"kept\\n")
with quiet.capture() as capture:
    leave()
    assert state() == before
    enter()
    os.write(2, b"user's C\\n")
    heard("PTX")
    assert quiet.take(capture, with_descriptor=True) == "PTX\\n"
    leave()
"""
    assert run(program) == ("", "kept\nuser's C\n")


def test_a_stream_that_the_user_puts_in_place_meanwhile():
    """It stays, and the one before is as it was."""
    program = """
original, before = sys.stderr, state()
enter()
sys.stderr = sys.stdout
leave()
assert sys.stderr is sys.stdout
sys.stderr = original
assert state() == before
"""
    assert run(program) == ("", "")


def test_a_descriptor_that_the_user_redirects_meanwhile():
    """It stays redirected, and Python's stderr follows it again."""
    program = """
enter()
file = tempfile.TemporaryFile()
os.dup2(file.fileno(), 2)
leave()
print("to the file", file=sys.stderr)
assert os.pread(file.fileno(), 100, 0) == b"to the file\\n"
"""
    assert run(program) == ("", "")


@pytest.mark.parametrize("shell", ["2>&-", ">&-", ">&- 2>&-"])
def test_closed_descriptors(shell: str):
    """As of a daemon: nothing to keep, nothing to restore, nothing left open."""
    program = """
before = state()
enter()
with quiet.capture():
    heard("PTX")
    os.write(2, b"MLIR\\n") if sys.stderr else None
leave()
assert state() == before
"""
    run(program, shell=shell)


def test_a_file_that_somebody_deletes_meanwhile():
    """Folders of temporary files are cleaned up now and then."""
    program = """
before = state()
enter()
os.unlink(quiet.kept_at)
os.write(2, b"C\\n")
leave()
assert state() == before
"""
    assert run(program) == ("", "C\n")


def test_no_room_for_a_file():
    """Then compilers are heard on descriptor 2, and nothing is left open."""
    program = """
def full(**options):
    raise OSError(28, "No space left on device")
tempfile.mkdtemp = full
before = state()
enter()
os.write(2, b"MLIR\\n")
print("stderr", file=sys.stderr)
leave()
assert state() == before
"""
    assert run(program) == ("", "MLIR\nstderr\n")


def test_megabytes_are_shortened():
    """Beginning and end are kept; a large rest that is somebody else's goes through a pipe in whole."""
    program = """
enter()
with quiet.capture() as capture:
    heard("begin" + "x" * 5_000_000 + "end")
    text = quiet.take(capture, with_descriptor=True)
assert text.startswith("begin") and text.endswith("end\\n") and len(text) < terminal.MAX_CHARS + 100
assert "[4800009 characters left out]" in text
os.write(2, b"y" * 3_000_000)
leave()
"""
    assert run(program) == ("", "y" * 3_000_000)


def test_a_compiler_that_ends_the_process_leaves_its_last_words():
    """LLVM aborts on some input: what it wrote is in a file of a folder named after the process."""
    program = PREAMBLE + "enter(); os.write(2, b'UNREACHABLE executed'); print(quiet.kept_at, flush=True); os.abort()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
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
    with quiet.capture() as capture:
        heard("PTX")
        os.write(2, b"MLIR\\n")
        assert quiet.take(capture, with_descriptor=True) == "PTX\\nMLIR\\n"
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


def test_writes_below_and_above_ours():
    """Bytes, and a method that was looked up before, reach the terminal; wrappers stay."""
    program = """
early = sys.stderr.write  # tqdm looks it up once
enter()
os.write(2, b"C\\n")
sys.stderr.buffer.write(memoryview(b"bytes\\n"))
early("early\\n")
ours = sys.stderr.write
sys.stderr.write = lambda text: ours(text.upper())
print("text", file=sys.stderr)
leave()
print("later", file=sys.stderr)
"""
    assert run(program) == ("", "bytes\nearly\nTEXT\nC\nLATER\n")
