"""The state of another process of this host, by a name that no later process has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_tune.distributed.processes import GONE, RUNS, STOPPED, UNKNOWN, process_name, state_of
from tests.programs import run_python

pytestmark = pytest.mark.processes

SLEEPS = "import time; time.sleep(60)"


def _name_of(pid: int) -> str:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return f"{process_name().rsplit(' ', 2)[0]} {pid} {fields[19]}"


def _becomes(name: str, state: str) -> bool:
    end = time.monotonic() + 5.0
    while state_of(name) != state and time.monotonic() < end:
        time.sleep(0.01)
    return state_of(name) == state


def test_a_process_runs_is_stopped_and_ends():
    """Also one that has ended and was not waited for."""
    with subprocess.Popen([sys.executable, "-c", SLEEPS]) as child:
        name = _name_of(child.pid)
        assert _becomes(name, RUNS)
        os.kill(child.pid, signal.SIGSTOP)
        assert _becomes(name, STOPPED)
        child.kill()
        assert _becomes(name, GONE)
    assert state_of(name) == GONE


def test_a_later_process_of_the_same_number_is_another_one():
    """By its start; and nothing is said of processes of other hosts, or of names that cannot be read."""
    here, pid, start = process_name().rsplit(" ", 2)
    assert state_of(process_name()) == RUNS
    assert state_of(f"{here} {pid} {int(start) + 1}") == GONE
    assert [state_of(name) for name in (f"other {pid} {start}", "", "x", f"{here} -1 {start}", f"{here} ../1 5")] == [UNKNOWN] * 5


def test_a_programs_name_may_hold_any_bytes(tmp_path: Path):
    """The system cuts it after 15 bytes, in the middle of a letter."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff) R \\xfe', 0, 0, 0)\n"
    code += "from dist_tune.distributed.processes import process_name, state_of\n"
    code += "from dist_tune.compiler.subprocesses.leftovers import _has_ended\nimport os\n"
    code += "print(state_of(process_name()), _has_ended(str(os.getpid())))"
    done = run_python("-c", code, cwd=tmp_path)
    assert done.stdout.split() == [RUNS, "False"], done.stderr
