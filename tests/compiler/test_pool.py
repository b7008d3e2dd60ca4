"""The threads that compile: their order, what ranks share, and what they leave behind."""

from __future__ import annotations

import ctypes
import errno
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
from triton.backends.nvidia.compiler import CUDABackend

from dist_tune.compiler import pool
from dist_tune.compiler.compilation import Compilation, Failure
from dist_tune.compiler.pool import Compiler, n_compile_threads, quickest, turns
from dist_tune.compiler.triton_cache import claim
from dist_tune.runtime.kernel import Launch
from dist_tune.testing import fake_gpu, on_ranks, values
from dist_tune.testing.ranks import fork_context
from tests.steps import autotuned, configs, dot_kernel, launch, tuned

NOTHING: Any = None


class Bench:
    """A compiler of things that a test defines: each candidate's work is a function that gets the candidate's number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[int] = []
        self.work: Callable[[int], Any] = lambda number: None
        self.stop = threading.Event()
        monkeypatch.setattr(pool, "Candidate", self.candidate)
        monkeypatch.setattr(pool, "max_shared_mem", lambda device: 1)
        monkeypatch.setattr(pool, "is_possible", lambda: False)
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_device=lambda: 0))

    def candidate(self, launch: Any, config: triton.Config) -> Any:
        number = config.kwargs["BLOCK"]

        def compile_() -> Any:
            self.began.append(number)
            return self.work(number)

        candidate = SimpleNamespace(compilation=Compilation(f"{number:012d}", compile_))
        candidate.load = lambda: candidate.compilation.result
        return candidate


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bench]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
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


def all_done(compiler: Compiler, label: str, candidates: range) -> None:
    for _ in compiler.wait(label, candidates):
        pass


# -- order -------------------------------------------------------------------------------------------------------------


def config(block: int, num_warps: int = 4, **options: Any) -> triton.Config:
    return triton.Config({"BLOCK": block}, num_warps=num_warps, **options)


def test_the_first_run_waits_for_the_candidate_that_compiles_fastest() -> None:
    """Smallest tile per warp first, then fewest stages, then the lowest index: the same on all ranks."""
    mine = [config(128), config(32, 8), config(32, 8, num_stages=2), config(64), config(32, 8, num_stages=2)]
    assert quickest(mine) == [2, 4, 1, 3, 0]


def test_ranks_begin_with_other_parts_that_make_up_all() -> None:
    """What differs in stages, and warps where there are many blocks, stays together; each rank has some of the long ones."""
    mine = [config(block, warps, num_stages=stages) for block in (16, 32, 64, 128) for warps in (4, 8) for stages in (1, 2)]
    by_rank = [[i for i, (part, *_) in enumerate(turns(mine, position, 2)) if part == 0] for position in range(2)]
    assert sorted(by_rank[0] + by_rank[1]) == list(range(16))
    assert [{mine[i].kwargs["BLOCK"] for i in each} for each in by_rank] == [{128, 32}, {64, 16}]
    few = [config(16, warps, num_stages=stages) for warps in (4, 8) for stages in (1, 2, 3)]
    assert [part for part, *_ in turns(few, 0, 2)] == [0, 0, 0, 1, 1, 1]


def test_what_a_launch_waits_for_is_compiled_before_all_others(bench: Bench) -> None:
    """With one thread, and candidates that take longer in the queue before it."""
    bench.work = lambda number: bench.stop.wait(10) if number in (128, 64) else None
    compiler = Compiler(1, 10.0)
    compiler.begin("site", NOTHING, dict(enumerate(configs(128, 64, 32, 16))), range(4), 3)
    assert compiler.load("site", 3) is None
    assert bench.began[0] == 16
    bench.stop.set()
    all_done(compiler, "site", range(4))
    compiler.end()
    assert [each for each in bench.began if each != 16] == [128, 64, 32]  # the longest first


# -- threads -----------------------------------------------------------------------------------------------------------


def test_no_more_threads_than_asked_for(bench: Bench) -> None:
    """Two at a time, also if several sites are taken up."""
    at_work, most, lock = 0, 0, threading.Lock()

    def work(number: int) -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.002)
        with lock:
            at_work -= 1

    bench.work, compiler = work, Compiler(2, 60)
    for label, first in (("one", 1), ("other", 11)):
        compiler.begin(label, NOTHING, dict(enumerate(configs(*range(first, first + 8)))), range(8))
    for label in ("one", "other"):
        all_done(compiler, label, range(8))
    compiler.end()
    assert (most, len(bench.began)) == (2, 16)


def test_one_that_never_ends_is_given_up_and_keeps_nobody_waiting(bench: Bench) -> None:
    """It fails with the reason after the deadline, another thread takes its place, and what it may still become is ignored."""
    bench.work = lambda number: bench.stop.wait(20) if number > 7 else number
    compiler = Compiler(1, 0.1)
    compiler.begin("site", NOTHING, dict(enumerate(configs(1, 2, 8, 9))), range(4))
    began = time.monotonic()
    all_done(compiler, "site", range(4))
    assert time.monotonic() - began < 15  # each of the two works for 20 s
    reason = "TimeoutError: has been compiling for 0.1 s; DIST_TUNE_DEADLINE_S sets the limit"
    assert compiler.failures("site") == {2: Failure(reason), 3: Failure(reason)}
    loaded: list[Any] = [compiler.load("site", i) for i in range(2)]
    assert loaded == [1, 2]
    bench.stop.set()
    time.sleep(0.02)
    assert compiler.load("site", 2) == Failure(reason)
    compiler.end()


def test_candidates_of_one_key_are_compiled_once(bench: Bench) -> None:
    """Of two sites too, and whichever of them is loaded first, also if nobody has queued the other."""
    compiler = Compiler(1, 60)
    bench.work = lambda number: number
    compiler.begin("one", NOTHING, dict(enumerate(configs(1, 2, 2))), [])
    compiler.begin("other", NOTHING, dict(enumerate(configs(2, 1))), [])
    loaded: list[Any] = [compiler.load("other", 0), compiler.load("one", 1), compiler.load("one", 2)]
    assert loaded == [2, 2, 2]
    compiler.queue("other", range(2))
    all_done(compiler, "one", range(1))
    compiler.end()
    assert bench.began == [2, 1]


def test_an_interrupt_ends_the_waiting_and_the_end_all_that_has_not_begun(bench: Bench) -> None:
    """Ctrl-C while a launch waits for its compilation; a thread at work ends with what it is at."""
    bench.work = lambda number: bench.stop.wait(20)
    compiler = Compiler(1, 60)
    compiler.begin("site", NOTHING, dict(enumerate(configs(1, 2))), range(2), 0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            compiler.load("site", 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        compiler.end()
    bench.stop.set()
    compiler.join(5)
    assert bench.began == [1]


def test_threads_share_the_cores_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert [n_compile_threads(n) for n in (1, 4, 5, 64)] == [16, 4, 3, 1]


# -- other processes ---------------------------------------------------------------------------------------------------


def hold(key: str, folder: str, is_held: Any, may_end: Any) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    with claim(key):
        is_held.set()
        may_end.wait(30)


@pytest.mark.processes
@pytest.mark.once
@pytest.mark.parametrize("end", ["released", "killed", "never"])
def test_a_kernel_that_another_process_compiles_comes_last(bench: Bench, tmp_path: Path, end: str) -> None:
    """The others go on; it is taken up when that process lets go or dies, and fails after the deadline if neither happens."""
    context = fork_context()
    is_held, may_end = context.Event(), context.Event()
    other = context.Process(target=hold, args=[f"{4:012d}", str(tmp_path), is_held, may_end])
    other.start()
    assert is_held.wait(60)
    compiler = Compiler(1, 0.5 if end == "never" else 60.0)
    compiler.begin("site", NOTHING, dict(enumerate(configs(4, 3, 2, 1))), range(4))
    all_done(compiler, "site", range(1, 4))
    assert bench.began == [3, 2, 1]
    if end == "killed":
        other.kill()
    elif end == "released":
        may_end.set()
    all_done(compiler, "site", range(4))
    other.kill()
    other.join()
    compiler.end()
    assert bench.began == ([3, 2, 1] if end == "never" else [3, 2, 1, 4])
    assert ("TimeoutError" in str(compiler.failures("site").get(0))) == (end == "never")


@pytest.mark.once
@pytest.mark.parametrize("why", ["", "no folder", "no locks"])
def test_where_there_are_no_locks_each_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """A cache folder that cannot be written, or a file system without locks."""

    def flock(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/cache" if why == "no folder" else str(tmp_path))
    if why == "no locks":
        monkeypatch.setattr("fcntl.flock", flock)
    with claim("ab" * 32) as first, claim("ab" * 32) as second:
        assert first is not None
        assert (second is None) == (why == "")


# -- loading -----------------------------------------------------------------------------------------------------------


def _loads_before_the_meeting(rank: int) -> Any:
    loads, met, begun = list[str](), list[int](), set[str]()
    load, compile_one = fake_gpu._Utils.load_binary, Compilation.run

    def compiling(self: Compilation, *args: Any, **options: Any) -> bool:
        begun.add(self.key)  # one that another thread was found to compile begins twice
        until = time.monotonic() + 20.0
        while len(begun) == 6 and len(loads) < 4 and time.monotonic() < until:  # the last one takes as long as that
            time.sleep(0.01)
        met.append(len(loads))
        return compile_one(self, *args, **options)

    def loading(self: Any, name: str, *rest: Any) -> Any:
        loads.append(name)
        return load(self, name, *rest)

    fake_gpu._Utils.load_binary, Compilation.run = loading, compiling  # type: ignore[method-assign,assignment]
    kernel, x = autotuned(blocks=(16, 32, 64, 128, 256, 512)), torch.zeros(64)
    tuned(None, lambda: launch(kernel, x), is_dist=False)()
    return len(loads), max(met)


@pytest.mark.processes
def test_kernels_are_loaded_while_others_are_compiled() -> None:
    """Most are on the device when the last one is compiled."""
    ((n_loads, n_before),) = values(on_ranks(1, _loads_before_the_meeting, mode="fake"))
    assert n_loads == 6
    assert n_before >= 4


# -- the end -----------------------------------------------------------------------------------------------------------


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
        compiler.begin("site", Launch(autotuned(dot_kernel), args, {"grid": (1,), "warmup": False}), dict(enumerate(candidates)), range(6))
        time.sleep(0.1)
        while is_stuck and len(stuck) < 2 and time.monotonic() - began < 60:  # until no thread is in the compiler's C++
            time.sleep(0.01)
        ctypes.pythonapi.Py_Exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic() - began


@pytest.mark.once
@pytest.mark.parametrize("is_stuck", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.processes
def test_a_process_can_end_while_threads_compile(is_stuck: bool) -> None:
    """Threads in the compiler's C++ when Python ends would abort the process; one that never ends must not keep it."""
    ((code, seconds),) = values(on_ranks(1, _exits, is_stuck, mode="fake", is_dist=False))
    assert code == 3
    assert seconds < 80  # the stuck thread sleeps for days; a busy machine takes 35 s to assemble what the others are at
