"""The threads that compile, and what they leave behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend

import dist_tune.compiler.pool
from dist_tune.compiler import pool
from dist_tune.compiler.candidate import Compilation, Failure
from dist_tune.compiler import front_end
from dist_tune.compiler.pool import Compiler, n_compile_threads
from dist_tune.compiler.triton_cache import host_of_cache
from dist_tune.runtime.kernel_launch import Launch
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import autotuned, configs

NOTHING: Any = None


class Bench:
    """A compiler of things that a test defines: each candidate's work is a function that gets the candidate's number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[int] = []
        self.work: Callable[[int], Any] = lambda number: None
        self.stop = threading.Event()
        monkeypatch.setattr(dist_tune.compiler.pool, "Candidate", self.candidate)
        monkeypatch.setattr(dist_tune.compiler.pool, "max_shared_mem", lambda device: 1)
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_device=lambda: 0))

    def candidate(self, launch: Any, config: triton.Config) -> Any:
        number = config.kwargs["BLOCK"]

        def compile_() -> Any:
            self.began.append(number)
            if hasattr(front_end._thread, "front_end"):
                front_end._thread.front_end.release()  # as at the end of Triton's front end
            return self.work(number)

        compilation = Compilation(f"{number:012d}", compile_)
        candidate = SimpleNamespace(compilation=compilation)
        candidate.load = lambda is_early=False: candidate.compilation.result
        return candidate


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    before = threading.active_count()
    yield bench
    bench.stop.set()
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.005)
    assert threading.active_count() == before
    assert Path(CUDABackend.make_ptx.__code__.co_filename).is_relative_to(Path(triton.__file__).parent)
    assert "write" not in vars(sys.stdout)


def outcome(compiler: Compiler, label: str, candidate: int) -> Any:
    """What a candidate became, loaded."""
    return compiler.load(label, candidate)


def all_done(compiler: Compiler, label: str, candidates: range) -> None:
    for _ in compiler.wait(label, candidates):
        pass


def test_the_longest_come_first(bench: Bench):
    """The last to end shall not be the longest."""
    compiler = Compiler(1, 60)
    compiler.begin("site", NOTHING, configs(1, 4, 3, 2), range(1, 4))
    all_done(compiler, "site", range(1, 4))
    compiler.close()
    assert bench.began == [4, 3, 2]


def test_no_more_threads_than_asked_for(bench: Bench):
    """Two at a time, also if several sites are taken up."""
    compiler = Compiler(2, 60)
    at_work, most, lock = 0, 0, threading.Lock()

    def work(number: int) -> None:
        nonlocal at_work, most
        compiler._front_end.release()  # as Triton's front end does at its end
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.002)
        with lock:
            at_work -= 1

    bench.work = work
    compiler.begin("one", NOTHING, configs(*range(1, 9)), range(8))
    compiler.begin("other", NOTHING, configs(*range(11, 19)), range(8))
    all_done(compiler, "one", range(8))
    all_done(compiler, "other", range(8))
    compiler.close()
    assert most == 2
    assert len(bench.began) == 16


def test_a_launch_does_not_wait_for_the_threads(bench: Bench):
    """A candidate to be loaded now is compiled although all threads are at something longer; one thread goes on afterwards."""
    bench.work = lambda number: bench.stop.wait(20) if number == 9 else number
    compiler = Compiler(1, 60)
    compiler.begin("site", NOTHING, configs(1, 2, 9), [2, 0])
    while not bench.began:
        time.sleep(0.001)
    assert outcome(compiler, "site", 1) == 2
    assert bench.began == [9, 2]
    bench.stop.set()
    all_done(compiler, "site", range(3))
    compiler.close()
    assert bench.began == [9, 2, 1]


def test_one_that_never_ends_is_given_up_and_keeps_nobody_waiting(bench: Bench):
    """It fails with the reason after the deadline, another thread takes its place, and what it may still become is ignored."""
    bench.work = lambda number: bench.stop.wait(20) if number > 7 else number
    compiler = Compiler(1, 0.1)
    compiler.begin("site", NOTHING, configs(1, 2, 8, 9), range(4))
    began = time.monotonic()
    all_done(compiler, "site", range(4))
    assert time.monotonic() - began < 15  # each of the two works for 20 s
    reason = "TimeoutError: has been compiling for 0.1 s; DIST_TUNE_DEADLINE_S sets the limit"
    assert compiler.failures("site") == {2: Failure(reason), 3: Failure(reason)}
    assert [outcome(compiler, "site", i) for i in range(2)] == [1, 2]
    bench.stop.set()
    time.sleep(0.02)
    assert compiler.load("site", 2) == Failure(reason)
    compiler.close()


def test_candidates_of_one_key_are_compiled_once(bench: Bench):
    """Of two sites too, and whichever of them is loaded first, also if nobody has queued the other."""
    compiler = Compiler(1, 60)
    bench.work = lambda number: number
    compiler.begin("one", NOTHING, configs(1, 2, 2), [])
    compiler.begin("other", NOTHING, configs(2, 1), [])
    assert [outcome(compiler, "other", 0), outcome(compiler, "one", 1), outcome(compiler, "one", 2)] == [2, 2, 2]
    compiler.queue("other", range(2))
    all_done(compiler, "one", range(1))
    compiler.close()
    assert bench.began == [2, 1]
    assert compiler.keys("one") == "000000000001" + 2 * "000000000002"


def test_after_the_end_nothing_new_is_taken_up(bench: Bench):
    """A thread at work ends with what it is at."""
    bench.work = lambda number: bench.stop.wait(20)
    compiler = Compiler(1, 60)
    compiler.begin("site", NOTHING, configs(1, 2), range(2))
    while not bench.began:
        time.sleep(0.001)
    compiler.close()
    bench.stop.set()
    compiler.join(5)
    assert bench.began == [2]


def test_an_interrupt_ends_the_waiting(bench: Bench):
    """Ctrl-C while a launch waits for its compilation."""
    bench.work = lambda number: bench.stop.wait(20)
    compiler = Compiler(1, 60)
    compiler.begin("site", NOTHING, configs(1), [])
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            compiler.load("site", 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        compiler.close()


def test_no_thread_to_be_had_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """It is raised where the user sees it; nobody waits for a thread that never came."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = Compiler(1, 60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            compiler.begin("site", NOTHING, configs(1), [0])
    compiler.close()


def test_the_host_is_the_machine_and_the_cache_folder_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two names of one folder are one host; a folder that cannot be used is nobody else's."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    hosts = []
    for folder in ("real", "link", "other", "/dev/null/cache"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        hosts.append(host_of_cache())
    assert hosts[0] == hosts[1]
    assert len(set(hosts)) == 3
    assert f"process {os.getpid()}" in hosts[3]


def test_threads_share_the_cores_of_a_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert [n_compile_threads(n) for n in (1, 4, 5, 64)] == [16, 4, 3, 1]


@triton.jit
def _dot_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, x))


def _exits(rank: int, is_stuck: bool) -> Any:
    """A child that ends as Python does: its exit code, or the negated signal; and how long it took."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(2)  # nanobind complains about what a stuck thread holds
        pool.EXIT_WAIT_S = 1.0 if is_stuck else 60.0
        compiler = Compiler(2, 60)
        stuck: list[int] = []
        if is_stuck:
            triton.knobs.compilation.listener = lambda **facts: stuck.append(1) or time.sleep(1e6)  # type: ignore[func-returns-value]
        candidates = [triton.Config({"BLOCK": 128}, num_warps=w, num_stages=s) for w in (1, 2, 4) for s in (1, 2)]
        args = torch.zeros(64, dtype=torch.float16), torch.zeros(64), 64
        compiler.begin("site", Launch(autotuned(_dot_kernel), args, {"grid": (1,), "warmup": False}), candidates, range(6))
        time.sleep(0.1)
        while is_stuck and len(stuck) < 2 and time.monotonic() - began < 60:  # until no thread is in the compiler's C++
            time.sleep(0.01)
        ctypes.pythonapi.Py_Exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic() - began


@pytest.mark.once
@pytest.mark.parametrize("is_stuck", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.processes
def test_a_process_can_end_while_threads_compile(is_stuck: bool):
    """Threads in the compiler's C++ when Python ends would abort the process; one that never ends must not keep it."""
    ((code, seconds),) = values(on_ranks(1, _exits, is_stuck, mode="fake", is_dist=False))
    assert code == 3
    assert seconds < 80  # the stuck thread sleeps for days; a busy machine takes 35 s to assemble what the others are at
