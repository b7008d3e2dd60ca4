"""Compilation in other processes: the same kernels, the same errors, and nothing lost when a process dies."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend

from dist_tune import contextual_autotune
from dist_tune.compiler import pool
from dist_tune.compiler.subprocesses import processes
from dist_tune.compiler.subprocesses.workers import Worker
from dist_tune.testing import on_ranks, values
from tests.cases import further
from tests.compiler.test_workers import is_gone

pytestmark = pytest.mark.processes

PATIENT = {"DIST_TUNE_DEADLINE_S": "30"}
CONFIGS = [(16, 16), (16, 32), (32, 32), (32, 64)]


@triton.jit
def product_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr):
    at_m, at_n, at_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, 32)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, 32):
        total = tl.dot(tl.load(a + at_m[:, None] * K + (k + at_k)[None, :]), tl.load(b + (k + at_k)[:, None] * BN + at_n[None, :]), total)
    tl.store(c + at_m[:, None] * BN + at_n[None, :], total)


@triton.jit
def bad_asm_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    loaded = tl.load(x + at)
    if BLOCK == 32:
        loaded = tl.inline_asm_elementwise("no.such.thing $0, $1;", "=r,r", [loaded], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x + at, loaded)


def tune(kernel: Any, configs: list[triton.Config], *args: Any, least_threads: int = 1) -> Any:
    """Tune one launch, with one thread or more in other processes; the record."""
    pool.MIN_THREADS_FOR_PROCESSES = least_threads
    autotuned = triton.autotune(configs, key=[])(kernel)

    @contextual_autotune(is_dist=False, cache=False)
    def step() -> None:
        autotuned[(1,)](*args)

    step()
    return step.records[0]


def tune_product(least_threads: int) -> dict[str, bytes]:
    data = torch.zeros(64, 64, dtype=torch.bfloat16)
    configs = [triton.Config({"BM": m, "BN": n}, num_warps=4, num_stages=stages) for m, n in CONFIGS for stages in (1, 2)]
    record = tune(product_kernel, configs, data, data, data.float(), 64, least_threads=least_threads)
    assert all(each.failure is None for each in record.candidates)
    return made()


def made() -> dict[str, bytes]:
    """PTX and cubins in Triton's disk cache."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.suffix in (".cubin", ".ptx")}


def note_stages() -> list[str]:
    """The stages that other processes are asked for, from now on."""
    asked: list[str] = []
    ask = Worker.ask

    def noting(self: Worker, request: Any) -> Any:
        asked.append(request[1])
        return ask(self, request)

    Worker.ask = noting  # type: ignore[method-assign]
    return asked


def product_here(rank: int) -> dict[str, bytes]:
    return tune_product(1000)


def product_elsewhere(rank: int) -> dict[str, bytes]:
    asked, made = note_stages(), tune_product(1)
    assert asked
    return made


def test_kernels_from_other_processes_are_the_same_to_the_bit() -> None:
    """PTX and cubin lie under the same keys in Triton's disk cache, with the same bytes."""
    (here,), (elsewhere,) = (values(on_ranks(1, f, mode="fake", is_dist=False, env=PATIENT)) for f in (product_here, product_elsewhere))
    assert len(here) == 4 * len(CONFIGS)
    assert here == elsewhere


def tune_equal(rank: int, least_threads: int) -> tuple[list[str], dict[str, bytes]]:
    asked = note_stages()
    configs = [triton.Config({"BLOCK": 64}, num_stages=stages) for stages in (1, 2, 3, 4)]
    record = tune(bad_asm_kernel, configs, torch.zeros(64, dtype=torch.int32), least_threads=least_threads)
    assert [each.equal_to for each in record.candidates] == [None, 0, 0, 0]
    return asked, made()


@pytest.mark.once
def test_equal_kernels_are_made_once_there_too() -> None:
    """Stages after TTGIR are taken over from another process's kernel, and their files are those that this process makes."""
    ((_, here),) = values(on_ranks(1, tune_equal, 1000, mode="fake", is_dist=False, env=PATIENT))
    ((asked, elsewhere),) = values(on_ranks(1, tune_equal, 1, mode="fake", is_dist=False, env=PATIENT))
    n_ttir, n_ttgir, n_llir, n_ptx, n_cubin = (asked.count(stage) for stage in processes.STAGES)
    assert (n_ttir, n_ttgir, n_cubin) == (4, 4, 1)
    assert n_llir + n_ptx < 8  # one that comes first to a later stage makes up for the earlier ones
    assert len(here) == 8
    assert here == elsewhere


def tune_bad_asm(rank: int) -> tuple[str | None, str | None]:
    record = tune(bad_asm_kernel, [triton.Config({"BLOCK": block}) for block in (32, 64)], torch.zeros(64, dtype=torch.int32))
    return record.candidates[0].failure, record.candidates[1].failure


def test_an_error_of_the_compiler_is_raised_as_at_home_and_its_output_is_in_the_log() -> None:
    """Ptxas refuses one config: Triton's PTXASError with its text; the PTX that Triton prints is in the log and not on the terminal."""
    (outcome,) = on_ranks(1, tune_bad_asm, mode="fake", is_dist=False, env=PATIENT)
    (failure, none), log = outcome.value, outcome.log
    assert none is None
    assert "PTXASError: " in failure
    assert "no.such.thing" in log


def die(stage: str, n_times: int) -> None:
    """Let the process of one config crash in a stage."""
    ask, dying, deaths = Worker.ask, set[int](), list[int]()

    def ask_dying(self: Worker, request: Any) -> Any:
        begun, asked, *_ = request
        if begun is not None:
            (dying.add if begun[2].num_warps == 8 else dying.discard)(id(self))
        if asked == stage and id(self) in dying and len(deaths) < n_times:
            deaths.append(self._process.pid)
            self._process.kill()
        return ask(self, request)

    Worker.ask = ask_dying  # type: ignore[method-assign]


def tune_with_a_crash(rank: int, stage: str, n_times: int) -> list[str | None]:
    die(stage, n_times)
    data = torch.zeros(64, 64, dtype=torch.bfloat16)
    configs = [triton.Config({"BM": m, "BN": n}, num_warps=8 if (m, n) == CONFIGS[-1] else 4) for m, n in CONFIGS]
    return [each.failure for each in tune(product_kernel, configs, data, data, data.float(), 64).candidates]


@pytest.mark.once
@pytest.mark.parametrize("stage", [processes.STAGES[0], *map(further, processes.STAGES[1:-1]), processes.STAGES[-1]])
def test_a_crash_that_does_not_come_again_costs_nothing(stage: str) -> None:
    """The kernel is compiled from the beginning in another process, once."""
    assert values(on_ranks(1, tune_with_a_crash, stage, 1, mode="fake", is_dist=False, env=PATIENT)) == [[None] * len(CONFIGS)]


@pytest.mark.once
def test_a_compiler_that_crashes_costs_one_candidate() -> None:
    """A process killed twice in the middle of a compilation is one config's failure, with the signal; the others are tuned."""
    (outcome,) = on_ranks(1, tune_with_a_crash, "llir", 2, mode="fake", is_dist=False, env=PATIENT)
    (failure,) = [each for each in values([outcome])[0] if each is not None]
    assert "CompilerCrashError: the compiler's process ended with exit code -9" in failure


def stop_one(rank: int) -> tuple[list[str | None], int]:
    stopped: list[int] = []
    asked = note_stages()
    ask = Worker.ask

    def stopping(self: Worker, request: Any) -> Any:
        if request[1] == "llir" and not stopped and "llir" in asked:  # the first one is of the launch that waits
            stopped.append(self._process.pid)
            os.kill(self._process.pid, signal.SIGSTOP)
        return ask(self, request)

    Worker.ask = stopping  # type: ignore[method-assign]
    data = torch.zeros(64, 64, dtype=torch.bfloat16)
    configs = [triton.Config({"BM": m, "BN": n}) for m, n in CONFIGS]
    return [each.failure for each in tune(product_kernel, configs, data, data, data.float(), 64).candidates], stopped[0]


@pytest.mark.once
def test_a_compilation_that_never_ends_is_given_up_and_its_process_ended() -> None:
    """After the deadline the config is dropped, and no process stays behind."""
    (outcome,) = on_ranks(1, stop_one, mode="fake", is_dist=False, env={"DIST_TUNE_DEADLINE_S": "5"})
    failures, pid = values([outcome])[0]
    (failure,) = [each for each in failures if each is not None]
    assert "TimeoutError" in failure
    assert is_gone(pid)


def too_large(rank: int) -> tuple[str | None, list[str]]:
    data = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    asked = note_stages()
    configs = [triton.Config({"BM": 16, "BN": 16}), triton.Config({"BM": 128, "BN": 256}, num_stages=12)]
    record = tune(product_kernel, configs, data, data, data.float(), 1024)
    return record.candidates[1].failure, asked


def test_a_kernel_beyond_the_shared_memory_is_not_assembled() -> None:
    """As in this process, the need is known after LLVM IR, and no PTX is made."""
    (outcome,) = on_ranks(1, too_large, mode="fake", is_dist=False, env=PATIENT)
    failure, asked = values([outcome])[0]
    assert failure is not None
    assert "OutOfResources" in failure
    assert (asked.count("llir"), asked.count("ptx"), asked.count("cubin")) == (2, 1, 1)


def tune_without_processes(rank: int, executable: str) -> tuple[list[str | None], bool, dict[str, bytes]]:
    sys.executable = executable
    data = torch.zeros(64, 64, dtype=torch.bfloat16)
    configs = [triton.Config({"BM": m, "BN": n}) for m, n in CONFIGS]
    record = tune(product_kernel, configs, data, data, data.float(), 64)
    return [each.failure for each in record.candidates], processes.is_possible(), made()


@pytest.mark.once
@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/python"])
def test_where_no_process_starts_this_one_compiles(executable: str) -> None:
    """A Python that ends at once, or is not there: no config is blamed, and it is not tried again."""
    (outcome,) = on_ranks(1, tune_without_processes, executable, mode="fake", is_dist=False, env=PATIENT)
    failures, is_possible, files = values([outcome])[0]
    assert failures == [None] * len(CONFIGS)
    assert not is_possible
    assert len(files) == 2 * len(CONFIGS)


def settings_stay_here(rank: int) -> bool:
    triton.knobs.propagate_env = False
    return processes.is_possible()


def test_settings_that_are_not_in_the_environment_keep_the_compiler_in_this_process() -> None:
    """``knobs.propagate_env = False``: another process would not have what ``triton.knobs`` is set to."""
    assert values(on_ranks(1, settings_stay_here, mode="fake", is_dist=False)) == [False]


def with_own_stage(rank: int) -> tuple[bool, int]:
    calls: list[object] = []
    own = CUDABackend.make_llir
    is_possible = processes.is_possible()

    def counted(self: Any, *args: Any) -> Any:
        calls.append(args)
        return own(self, *args)

    CUDABackend.make_llir = counted
    tune_product(1)
    return is_possible, len(calls)


@pytest.mark.once
def test_a_patched_compiler_stays_in_this_process() -> None:
    """Another process would not have the patch."""
    ((is_possible, n_calls),) = values(on_ranks(1, with_own_stage, mode="fake", is_dist=False, env=PATIENT))
    assert is_possible
    assert n_calls == 2 * len(CONFIGS)


def leave_out(rank: int) -> bytes:
    """PTX and cubin of a kernel whose LLVM IR another process has made."""
    own = processes.Job.run

    def run(self: processes.Job, stage: str, metadata: Any, options: Any) -> str | bytes:
        if stage == "llir":  # made by another process
            with processes.in_process(is_urgent=False) as other:
                other.begun = self.begun
                made_there = [own(other, each, metadata, options) for each in processes.STAGES[:3]]
            processes._thread.job = self
            return made_there[-1]
        return own(self, stage, metadata, options)

    processes.Job.run = run  # type: ignore[method-assign]
    return not_left_out(rank, least_threads=1)


def not_left_out(rank: int, least_threads: int = 1000) -> bytes:
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    record = tune(bad_asm_kernel, configs, torch.zeros(128, dtype=torch.int32), least_threads=least_threads)
    assert [each.failure for each in record.candidates] == [None, None]
    return b"".join(sorted(made().values()))


def test_a_stage_that_was_left_out_is_made_up_for() -> None:
    """LLVM's targets are set up by the stage for LLVM IR: PTX from another process's text would crash without."""
    left, whole = (values(on_ranks(1, f, mode="fake", is_dist=False, env=PATIENT)) for f in (leave_out, not_left_out))
    assert left == whole
