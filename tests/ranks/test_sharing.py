"""Compilation by the ranks of a host: who compiles what, what is dropped on all, and what is left behind. Real sm_90 code."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import max_shared_mem
from triton.runtime import _async_compile

from dist_tune import contextual_autotune
from dist_tune.testing import FakeH200
from tests.compiler.test_candidate import in_memory
from tests.steps import (
    Job,
    add_kernel,
    autotuned,
    best,
    configs,
    dot_kernel,
    edited,
    failures,
    launch,
    records,
    shift_kernel,
    tuned,
)
from tests.worlds import further, gathered, log, on_each_rank

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def forget() -> None:
    """What earlier tests of this process have compiled, and the device's limit."""
    max_shared_mem.cache_clear()
    for kernel in (add_kernel, shift_kernel, dot_kernel):
        kernel.device_caches.clear()


def compiled() -> list[int]:
    """From here on, with nothing in memory, the block sizes of what this rank compiles and does not find on disk."""
    blocks: list[int] = []

    def listener(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        if not cache_hit:
            blocks.append(src.constants[(src.fn.arg_names.index("BLOCK"),)])

    triton.knobs.compilation.listener = listener
    forget()
    return blocks


def by_ranks(blocks: list[int], *ranks: int) -> list[int]:
    """What these ranks compile together without the first candidate, which each rank launches at once: several may compile that."""
    everyone = gathered(blocks)
    return sorted(block for rank in ranks for block in everyone[rank] if block != 16)


# -- who compiles what ---------------------------------------------------------------------------------------------------


@on_each_rank(modes=("fake",))
def test_each_kernel_is_compiled_once_for_a_cache_folder(rank: int):
    """The ranks that share a folder share the work out, for two keys of the tuner as for one; every rank loads all."""
    blocks, kernel = compiled(), autotuned(blocks=(16, 32, 64, 128))
    step = tuned(kernel, lambda: [launch(kernel, torch.zeros(n)) for n in (64, 128)])
    step()
    assert by_ranks(blocks, 0, 1) == [32, 64, 128]
    assert [[each.n_regs for each in record.candidates] for record in step.records] == [[64] * 4] * 2
    assert in_memory(add_kernel) == ["CompiledKernel"] * 4


@on_each_rank(modes=("fake",))
def test_ranks_with_a_cache_folder_each_compile_all(rank: int):
    """Files of another folder cannot be loaded."""
    os.environ["TRITON_CACHE_DIR"] += f"/{rank}"
    blocks = compiled()
    step = tuned(autotuned(blocks=(16, 32)))
    step(torch.zeros(64))
    assert (sorted(blocks), [each.n_regs for each in step.records[0].candidates]) == ([16, 32], [64] * 2)


@on_each_rank(3, modes=("fake",))
def test_ranks_whose_kernels_differ_compile_their_own(rank: int):
    """An integer that is 1 is part of the kernel: ranks 0 and 1 share theirs, rank 2 has its own."""
    blocks, kernel = compiled(), autotuned(shift_kernel, blocks=(16, 32, 64))
    x = torch.zeros(64)
    step = tuned(kernel, lambda: kernel[(1,)](x, x, 64, [3, 5, 1][rank]))
    step()
    assert (by_ranks(blocks, 0, 1), by_ranks(blocks, 2)) == ([32, 64], [32, 64])
    assert [each.n_regs for each in step.records[0].candidates] == [64] * 3


@on_each_rank(modes=("fake",))
def test_a_cache_that_cannot_be_written_is_named(rank: int):
    """Each rank compiles for itself; the first says what is wrong, and each has it in its log.

    An empty ``LOCAL_WORLD_SIZE``, as some launchers leave it, counts as none.
    """
    os.environ.update(TRITON_CACHE_DIR="/dev/null/cache", LOCAL_WORLD_SIZE="")
    forget()
    text = "Triton's cache folder /dev/null/cache cannot be written (Not a directory)"
    with pytest.warns(UserWarning, match=re.escape(text)) if rank == 0 else nullcontext():
        tuned(autotuned(blocks=(16, 32)))(torch.zeros(64))
    assert log().count(text) == 1


@on_each_rank(1, modes=("fake",), is_dist=False)
def test_threads_compile_beside_the_discovery_replay(rank: int):
    """The closure's own Python goes on, and before it returns all candidates are compiled."""
    blocks, kernel, seen = compiled(), autotuned(), list[int]()

    def closure(x: torch.Tensor) -> None:
        launch(kernel, x)
        end = time.monotonic() + 20
        while len(blocks) < 3 and time.monotonic() < end:
            sum(range(1000))  # the closure's own Python
        seen.append(len(blocks))

    tuned(None, closure, is_dist=False)(torch.zeros(64))
    assert seen[0] == 3


@on_each_rank(modes=("fake",))
def test_a_hit_compiles_its_config_alone(rank: int):
    """With nothing on disk but the record: one kernel on each rank; resource facts of all candidates are in the record."""
    forget()
    Job("contextual")
    edited(rank, winner=64)
    (record,) = records()
    assert [(each.shared_bytes, each.n_regs, each.n_spills) for each in record.candidates] == [(0, 64, 0)] * 3
    os.environ["TRITON_CACHE_DIR"] += f"/of a second job on rank {rank}"
    blocks = compiled()
    again = Job("contextual")
    assert (again.how, blocks) == ("hit 64", [64])
    assert [each.n_regs for each in again.record.candidates] == [64] * 3


# -- what is dropped -----------------------------------------------------------------------------------------------------


@on_each_rank(modes=("fake",), cases=[further([0, 1]), [1]])
def test_what_does_not_fit_is_dropped_before_any_launch(rank: int, who: list[int]) -> Any:
    """On one rank or all: on all ranks, with the reason and the need in record and log; where no rank has room it is not assembled."""
    launched: list[int] = []
    x = torch.zeros(64, dtype=torch.float16)

    def launch_ms(src: Any, metadata: Any) -> float:
        launched.append(metadata.shared)
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeH200, "launch_ms", launch_ms)
        if rank in who:
            patch.setattr(FakeH200, "shared_limit_bytes", 32767)
        for _ in range(2):  # the second one finds all on disk
            forget()
            kernel = autotuned(dot_kernel, configs=[*configs(128), *configs(128, num_warps=8), *configs(32)])
            step = tuned(kernel, lambda kernel=kernel: kernel[(1,)](x, x, 64))
            step()
            *large, small = failures(step)
            for failure in large:
                assert "OutOfResources: out of resource: shared memory, Required: 32768, Hardware limit: 32767" in str(failure)
            assert small is None
            facts = [(each.shared_bytes, each.n_regs) for each in step.records[0].candidates]
            assert [shared for shared, _ in facts] == [32768, 32768, 2048]
            assert (facts[2], facts[0]) == ((2048, 64), (32768, None)) or who != [0, 1]
    assert set(launched) == {2048} or (who, rank) == ([1], 0)
    assert "dropped: rank" in log()
    return facts


@on_each_rank(modes=("fake",), cases=[further(16), 32])
def test_a_compilation_that_never_ends_is_dropped_on_all_ranks(rank: int, block: int):
    """The first launch waits for it on one rank, or no launch does; after the deadline it has failed for a reason."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "2"

    def listener(*, src: Any, **facts: Any) -> None:
        if rank == 1 and block in src.constants.values():
            threading.Event().wait()

    triton.knobs.compilation.listener = listener
    forget()
    make_ptx = CUDABackend.make_ptx
    step = tuned(autotuned())
    step(torch.zeros(64))
    failed = failures(step)
    assert "TimeoutError: has been compiling for" in str(failed.pop((16, 32, 64).index(block)))
    assert failed == [None, None]
    assert (CUDABackend.make_ptx is make_ptx, _async_compile.active_mode.get()) == (True, None)
    assert set(in_memory(add_kernel)) == {"CompiledKernel"}


# -- what is left behind -------------------------------------------------------------------------------------------------


def state() -> Any:
    """What a tuning changes while it compiles; waits for its threads to end."""
    end = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.01)
    mode, n_files = _async_compile.active_mode.get(), len(os.listdir("/proc/self/fd"))
    return CUDABackend.make_ptx, mode, sys.stdout, sys.stderr, os.fstat(2).st_ino, n_files, threading.active_count()


@on_each_rank(1, modes=("fake",), is_dist=False, cases=[None, KeyError, KeyboardInterrupt])
def test_triton_and_the_terminal_are_left_as_found(rank: int, error: type[BaseException] | None):
    """After a tuning, and after an exception in the middle of the first run while threads compile."""
    forget()
    before, kernel = state(), autotuned(blocks=(16, 32, 64, 128))

    def closure(x: torch.Tensor) -> None:
        launch(kernel, x)
        if error is not None:
            raise error("in the first run")

    step = contextual_autotune(is_dist=False, **QUICK)(closure)
    if error is None:
        step(torch.zeros(64))
    else:
        with pytest.raises(error):
            step(torch.zeros(64))
    assert state() == before
    assert set(in_memory(add_kernel)) == {"CompiledKernel"}


@on_each_rank(1, modes=("fake",), is_dist=False)
def test_two_tunings_in_two_threads(rank: int):
    """Both compile at once, one after the other goes on, and the last to leave restores all."""
    forget()
    before, both = state(), threading.Barrier(2, timeout=20)
    kernels = autotuned(blocks=(16, 32)), autotuned(shift_kernel, blocks=(16, 32))
    x, runs = torch.zeros(64), [0, 0]

    def tune(number: int) -> None:
        def closure() -> None:
            kernels[number][(1,)](x, x, 64, *[7] * number)
            runs[number] += 1
            if runs[number] == 1:
                both.wait()  # both compile

        contextual_autotune(is_dist=False, **QUICK)(closure)()

    threads = [threading.Thread(target=tune, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ([len(best(kernel)) for kernel in kernels], state() == before) == ([1, 1], True)
