"""The processes that compile: what a crash costs, what stays in the rank, what is left behind, and
the user's program.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend

from dist_tune import contextual_autotune
from dist_tune.compiler import worker
from dist_tune.testing import FakeH200, values
from tests.steps import (
    add_kernel,
    autotuned,
    configs,
    failures,
    launch,
    online_threads,
    run_job,
    shift_kernel,
    tuned,
)
from tests.worlds import ROOT, log, on_each_rank, on_fake

pytestmark = [pytest.mark.processes, pytest.mark.once]

alone: Any = {"n": 1, "modes": ["fake"], "is_dist": False}
LONG_S = 60.0


def fresh(*warps: int) -> Any:
    """Autotuned, with nothing in its memory: a config for each number of warps, which PTX has as 32
    times as many threads.
    """
    return autotuned(
        triton.jit(add_kernel.fn),
        configs=[config for each in warps for config in configs(16, num_warps=each)],
    )


def processes_of(pid: int) -> dict[int, str]:
    """Those that a process has started, and the state of each: T is stopped, Z has ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid:
            found[int(path.parent.name)] = state
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(is_so: Callable[[], Any]) -> Any:
    """What it gives as soon as that is true."""
    end = time.monotonic() + LONG_S
    while not (found := is_so()):
        assert time.monotonic() < end, "it never was"
        time.sleep(0.01)
    return found


def assemble_with(script: str) -> Path:
    """Let ptxas begin with lines of shell: ``$threads`` of the kernel, a folder ``$to``, which is
    returned, its caller ``$PPID``.
    """
    folder, real = Path(tempfile.mkdtemp()), triton.knobs.nvidia.ptxas.path
    text = f"""#!/bin/sh
[ "$1" = --version ] && exec {real} --version
for each; do case $each in *.ptx) ptx=$each;; esac; done
threads=$(sed -n 's/.*ntid  *\\([0-9]*\\).*/\\1/p' "$ptx" | head -n 1) to={folder}
{script}
exec {real} "$@"
"""
    (path := folder / "ptxas").write_text(text)
    path.chmod(0o755)
    os.environ["TRITON_PTXAS_PATH"] = os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = str(path)
    return folder


def started() -> list[Any]:
    """Processes that this one starts from here on to compile."""
    found = list[Any]()
    sys.addaudithook(
        lambda event, args: (
            found.append(args[1])
            if event == "subprocess.Popen" and args[0] == sys.executable
            else None
        )
    )
    return found


@on_each_rank(**alone)
def test_a_process_that_ends_costs_one_candidate(rank: int):
    """A crash, with its last words in the log; a kill, most likely for memory; a compilation
    without an end. Ctrl-C is the rank's.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = "12"
    notes = assemble_with(
        """case $threads in
            256) kill -ABRT $PPID; exit 1;;
            64) kill -KILL $PPID; exit 1;;
            32) echo $PPID >$to/stopped; kill -STOP $PPID; sleep 600;;
            128) kill -INT $PPID;;
        esac"""
    )
    step = tuned(fresh(8, 4, 2, 1), is_dist=False)
    step(torch.zeros(64))
    crashed, interrupted, killed, stopped = failures(step)
    assert (
        f"CompilerCrashError: the compiler's process ended with exit code -{signal.SIGABRT.value}"
        in str(crashed)
    )
    assert "Fatal Python error: Aborted" in log()
    assert "MemoryError: the compiler's process ended with exit code -9" in str(killed)
    assert "TimeoutError" in str(stopped)
    assert interrupted is None
    until(lambda: is_gone(int((notes / "stopped").read_text())))


@on_each_rank(**alone)
def test_a_process_that_has_ended_for_want_of_work_costs_no_candidate(rank: int):
    """It may end between the look at it and the request: the front end runs meanwhile.

    Another one takes the kernel.
    """
    short = Path(tempfile.mkdtemp()) / "worker.py"
    short.write_text(re.sub(r"\bIDLE_S = .*", "IDLE_S = 0.2", Path(worker.__file__).read_text()))
    found, parse = started(), triton.JITFunction.parse

    def slow(kernel: Any) -> Any:
        """A front end that takes until all processes have ended."""
        until(lambda: {*processes_of(os.getpid()).values()} <= {"Z"})
        return parse(kernel)

    step = tuned(fresh(4, 8), is_dist=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "__file__", str(short))
        patch.setattr(triton.JITFunction, "parse", slow)
        step(torch.zeros(64))
    assert failures(step) == [None, None]
    assert len(found) > 2


@on_each_rank(
    **alone, is_alone=True, cases=["a setting", "a patch", "a hook", "a stage", "/bin/false"]
)
def test_a_compiler_that_is_not_triton_s_alone_stays_in_this_process(rank: int, reason: str):
    """Another process would not have the setting, the patch, or the hook.

    Nor is one tried again where none starts; no config is blamed.
    """
    found, calls, own = started(), list[object](), CUDABackend.make_llir

    def make_llir(self: Any, *args: Any) -> Any:
        calls.append(args)
        return own(self, *args)

    with pytest.MonkeyPatch.context() as patch, triton.knobs.compilation.scope():
        if reason == "a setting":
            patch.setattr(triton.knobs, "propagate_env", False)
        elif reason == "a patch":
            patch.setattr(CUDABackend, "make_llir", make_llir)
        elif reason == "a hook":
            triton.knobs.compilation.listener = lambda **facts: calls.append(facts)
        elif reason == "a stage":
            patch.setattr(
                triton.knobs.runtime, "add_stages_inspection_hook", lambda *stages: ("", "")
            )
        else:
            patch.setattr(sys, "executable", reason)
        step = tuned(fresh(4, 8), is_dist=False)
        step(torch.zeros(64))
    assert failures(step) == [None, None]
    assert (len(calls), bool(found)) == (
        2 if reason in ("a patch", "a hook") else 0,
        reason == "/bin/false",
    )
    if found:
        found.clear()
        tuned(fresh(1, 2), is_dist=False)(torch.zeros(64))
        assert found == []


@on_each_rank(**alone)
def test_a_process_is_used_again_in_the_same_environment_and_ends_with_the_tuning(rank: int):
    """Triton reads its settings from there: each kernel is compiled with those of its rank."""
    found, kernels, x = (
        started(),
        [autotuned(triton.jit(each.fn)) for each in (add_kernel, shift_kernel)],
        torch.zeros(64),
    )

    def ptx(name: str) -> list[str]:
        return [
            path.read_text() for path in Path(os.environ["TRITON_CACHE_DIR"]).glob(f"*/{name}.ptx")
        ]

    def step() -> None:
        launch(kernels[0], x)
        until(lambda: len(ptx("add_kernel")) == 3)
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        kernels[1][(1,)](x, x, 64, 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: {0})
        tuned(None, step, is_dist=False)()
    assert [[".loc" in text for text in ptx(name)] for name in ("add_kernel", "shift_kernel")] == [
        [True] * 3,
        [False] * 3,
    ]
    # A thread, and one beside it that a launch waits for, in either environment.
    assert 2 <= len(found) <= 4
    until(lambda: {*processes_of(os.getpid()).values()} <= {"Z"})


@on_each_rank(**alone)
def test_processes_are_stopped_beside_plain_calls(rank: int):
    """A tuning beside the calls of a job compiles beside some of them alone, and goes on after
    that.
    """
    notes = assemble_with(
        "if [ $threads = 128 ]; then while [ ! -e $to/may_end ]; do sleep 0.02; done; fi"
    )
    kernel, weight = fresh(8, 4), torch.zeros(1)
    FakeH200.launch_ms = staticmethod(lambda source, metadata: 1.0)

    @contextual_autotune(is_dist=False, search="online", max_slowdown=0.5)
    def step(k: int) -> float:
        launch(kernel, torch.zeros(64))
        weight.add_(1.0)
        return float(weight)

    def is_stopped() -> bool:
        step(0)
        return "T" in processes_of(os.getpid()).values()

    until(is_stopped)
    (notes / "may_end").touch()
    run_job(step)
    assert (online_threads(), failures(step)) == ([], [None, None])


def _tuned_with(rank: int, folder: Path, script: str) -> list[str | None]:
    if script:
        notes = assemble_with(script)

        def kill() -> None:
            until((notes / "pid").exists)
            os.replace(notes / "pid", folder.parent / "pid")
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    step = tuned(fresh(4, 8), is_dist=False)
    step(torch.zeros(64))
    return failures(step)


def test_what_a_killed_rank_leaves_ends_with_it_and_is_swept(tmp_path: Path):
    """The compiler's process in the middle of a kernel, with the assembler, which may never end;
    and what Triton gives that.

    The next tuning sweeps it, but no folder of a process that lives, nothing of another name, and
    nothing that a link leads to.
    """
    (folder := tmp_path / "tmp").mkdir()
    for name in ("dist_tune-notes", "dist_tune_compiles-held"):
        (folder / name).mkdir()
    (folder / "dist_tune_compiles-file").touch()
    (folder / "dist_tune_compiles-link").symlink_to(folder / "dist_tune-notes")
    others = {*folder.iterdir()}
    held = os.open(folder / "dist_tune_compiles-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    never_ends = "echo $$ $PPID >$to/pid.new; mv $to/pid.new $to/pid; sleep 600"
    assert on_fake(1, _tuned_with, folder, never_ends, is_dist=False)[0].error == "Died"
    pids = [int(pid) for pid in (tmp_path / "pid").read_text().split()]
    until(lambda: all(map(is_gone, pids)))
    assert [*folder.rglob("*.ptx")]
    assert values(on_fake(1, _tuned_with, folder, "", is_dist=False)) == [[None, None]]
    os.close(held)
    assert {*folder.iterdir()} == others


PROGRAM = """
import os, sys, threading, time
import torch, triton
import triton.runtime.cache as cache

own, calls, in_step = cache.triton_key, [], threading.Event()

def triton_key():
    calls.append(threading.current_thread().name)
    if len(calls) == 1:
        in_step.wait(60)
        time.sleep(0.3)
        calls.append("has failed")
        raise OSError("cannot read libtriton.so")
    return own()

cache.triton_key = triton_key
print("main of", __name__, flush=True)
from dist_tune.compiler import pool
from dist_tune.testing import install_fake_driver
from tests.compiler.test_processes import failures, fresh, launch, started, tuned

install_fake_driver()
pool.EXIT_WAIT_S, found, kernel = 1.0, started(), fresh(4, 8)

def step():
    in_step.set()
    launch(kernel, torch.zeros(64))

step = tuned(None, step, is_dist=False)
step()
print(failures(step), bool(found), calls[:2], "MainThread" in calls[2:], flush=True)
stuck = threading.Event()

def listener(**facts):
    if facts["metadata"]["num_warps"] == 1:
        stuck.set()
        time.sleep(1e6)

triton.knobs.compilation.listener, kernel = listener, fresh(1, 8)

def exits():
    launch(kernel, torch.zeros(64))
    stuck.wait(60)
    sys.exit(3)

tuned(None, exits, is_dist=False)()
"""


def test_a_program_runs_once_and_can_end_while_threads_compile(tmp_path: Path):
    """Processes that compile do not import it, which has no ``if __name__ == "__main__"``; a thread
    that never ends does not keep it.

    Of the digest of Triton's own files, which a thread makes ahead: launches wait for that, and an
    error there is told by none.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    folders = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "DIST_TUNE_LOG_DIR": str(tmp_path),
        "DIST_TUNE_VERBOSITY": "quiet",
    }
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, **folders, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout.splitlines() == [
        "main of __main__",
        "[None, None] True ['dist_tune digest', 'has failed'] True",
    ], done.stderr
    assert (done.returncode, "libtriton" in done.stderr) == (3, False)
