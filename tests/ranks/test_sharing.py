"""Compilation shared by the ranks of a host: who compiles what, and what is dropped on all. Real sm_90 code."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import _async_compile

from dist_tune import contextual_autotune
from dist_tune.testing import FakeH200, Outcome, values
from tests.cases import further
from tests.compiler.test_candidate import in_memory
from tests.ranks.kernels import add_kernel, autotuned, best, copy_of, launch, tuned
from tests.ranks.worlds import on_ranks

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


@triton.jit
def rank_kernel(x_ptr, y_ptr, n, rank, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + rank, mask=at < n)


@triton.jit
def dot_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PACK: tl.constexpr):
    """With PACK 3 not valid: MLIR says so on descriptor 2, and Triton prints the module."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    if PACK == 3:
        x = tl.inline_asm_elementwise("", "=r,r", [x.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=PACK).to(x.dtype)
    tl.store(y_ptr + at, tl.dot(x, x))


def compiled() -> list[int]:
    """From here on, the block sizes of what this rank compiles and does not find on disk."""
    blocks: list[int] = []

    def listener(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        if not cache_hit:
            blocks.append(src.constants[(src.fn.arg_names.index("BLOCK"),)])

    triton.knobs.compilation.listener = listener
    return blocks


def on_fake(n: int, function: Any, *args: Any, is_dist: bool = True, **env: str) -> list[Outcome]:
    # Triton 3.9 warns on the terminal if this is not set.
    return on_ranks(n, function, *args, mode="fake", is_dist=is_dist, env={"TRITON_DEFAULT_FP_FUSION": "1", **env})


def dots(*candidates: triton.Config) -> Any:
    """A closure of one launch of ``dot_kernel``."""
    kernel = triton.autotune(configs=list(candidates), key=["n"])(dot_kernel)
    x = torch.zeros(64, dtype=torch.float16)
    return tuned(kernel, lambda: kernel[(1,)](x, x, 64))


def dot(block: int, pack: int = 1, **options: Any) -> triton.Config:
    return triton.Config({"BLOCK": block, "PACK": pack}, **options)


def failures(step: Any) -> list[str | None]:
    """Of the candidates of the first record, what made them fail."""
    return [each.failure for each in step.records[0].candidates]


# -- who compiles what ---------------------------------------------------------------------------------------------------


def _shares(rank: int, does_share: bool) -> Any:
    if not does_share:
        os.environ["TRITON_CACHE_DIR"] += f"/{rank}"
    blocks = compiled()
    step = tuned(autotuned(blocks=(16, 32, 64, 128)))
    step(torch.zeros(64))
    return blocks, [each.n_regs for each in step.records[0].candidates], in_memory(add_kernel)


def without_first(blocks: list[int]) -> list[int]:
    """Without the first candidate, which each rank launches at once: several may compile that."""
    return sorted(block for block in blocks if block != 16)


@pytest.mark.parametrize("n", [further(2), 3])
def test_each_kernel_is_compiled_once_for_a_cache_folder(n: int):
    """The ranks that share a folder share the work out; every rank loads all."""
    got = values(on_fake(n, _shares, True))
    by_rank = [without_first(blocks) for blocks, _, _ in got]
    assert sorted(block for blocks in by_rank for block in blocks) == [32, 64, 128]
    assert [loaded for _, loaded, _ in got] == [[64] * 4] * n
    assert [kernels for _, _, kernels in got] == [["CompiledKernel"] * 4] * n


@pytest.mark.once
def test_ranks_with_a_cache_folder_each_compile_all():
    """Files of another folder cannot be loaded."""
    for blocks, loaded, _ in values(on_fake(2, _shares, False)):
        assert (sorted(blocks), loaded) == ([16, 32, 64, 128], [64] * 4)


def _specialised(rank: int, ranks: list[int]) -> Any:
    blocks = compiled()
    kernel = autotuned(rank_kernel, blocks=(16, 32, 64))
    x = torch.zeros(64)
    step = tuned(kernel, lambda: kernel[(1,)](x, x, 64, ranks[rank]))
    step()
    return blocks, [each.n_regs for each in step.records[0].candidates]


@pytest.mark.once
def test_ranks_whose_kernels_differ_compile_their_own():
    """An integer that is 1 is part of the kernel: ranks 0 and 1 share theirs, rank 2 has its own."""
    got = values(on_fake(3, _specialised, [3, 5, 1]))
    assert without_first(got[0][0] + got[1][0]) == [32, 64]
    assert sorted(got[2][0]) == [16, 32, 64]
    assert [loaded for _, loaded in got] == [[64] * 3] * 3


def _two_sites(rank: int) -> Any:
    blocks = compiled()
    kernel = autotuned(blocks=(16, 32, 64))
    step = tuned(kernel, lambda: [launch(kernel, torch.zeros(n)) for n in (64, 128)])
    step()
    return blocks, len(step.records), in_memory(add_kernel)


@pytest.mark.once
def test_two_sites_of_one_kernel_are_compiled_once():
    """Two keys of the tuner, one key of the compiler."""
    got = values(on_fake(2, _two_sites))
    assert without_first(got[0][0] + got[1][0]) == [32, 64]
    assert [rest for _, *rest in got] == [[2, ["CompiledKernel"] * 3]] * 2


def _unwritable(rank: int) -> Any:
    tuned(autotuned(blocks=(16, 32)))(torch.zeros(64))


@pytest.mark.once
def test_a_cache_that_cannot_be_written_is_named():
    """Each rank compiles for itself, and says what is wrong."""
    for each in on_fake(2, _unwritable, TRITON_CACHE_DIR="/dev/null/cache"):
        assert not each.error, each.message
        assert "Triton's cache folder /dev/null/cache cannot be written (Not a directory)" in each.log


def _beside(rank: int) -> Any:
    blocks = compiled()
    kernel = autotuned(blocks=(16, 32, 64))
    seen = []

    def closure(x: torch.Tensor) -> None:
        launch(kernel, x)
        end = time.monotonic() + 20
        while len(blocks) < 3 and time.monotonic() < end:
            sum(range(1000))  # the closure's own Python
        seen.append(len(blocks))

    contextual_autotune(is_dist=False, **QUICK)(closure)(torch.zeros(64))
    return seen[0]


@pytest.mark.once
def test_threads_compile_beside_the_discovery_replay():
    """The closure's own Python goes on, and before it returns all candidates are compiled."""
    assert values(on_fake(1, _beside, is_dist=False)) == [3]


def _made_anew(rank: int) -> Any:
    blocks = compiled()
    kernels = []

    def closure(x: torch.Tensor) -> None:
        kernels.append(triton.jit(copy_of(add_kernel.fn)))
        launch(autotuned(kernels[-1], blocks=(16, 32)), x)

    step = tuned(None, closure)
    step(torch.zeros(64))
    return blocks, failures(step), len(step.records), len({id(each) for each in kernels}) > 2


@pytest.mark.once
def test_a_kernel_defined_anew_in_every_replay():
    """One site; later objects find on disk what was compiled for the first."""
    got = values(on_fake(2, _made_anew))
    assert sorted(block for blocks, *_ in got for block in blocks if block != 16) == [32]
    assert [rest for _, *rest in got] == [[[None, None], 1, True]] * 2


def _too_large(rank: int, who: list[int]) -> Any:
    if rank in who:
        FakeH200.shared_limit_bytes = 32767
    passes: list[object] = []
    launched: list[int] = []
    make_llir, make_cubin = CUDABackend.make_llir, CUDABackend.make_cubin

    def llir(self: Any, *args: Any) -> Any:
        passes.append("llir")
        return make_llir(self, *args)

    def cubin(self: Any, src: Any, metadata: dict[str, Any], *args: Any) -> Any:
        passes.append(metadata["shared"])
        return make_cubin(self, src, metadata, *args)

    def launch_ms(src: Any, metadata: Any) -> float:
        launched.append(metadata.shared)
        return 0.0

    CUDABackend.make_llir, CUDABackend.make_cubin, FakeH200.launch_ms = llir, cubin, launch_ms
    candidates = [dot(128), dot(128, num_warps=8), dot(32)]
    step = dots(*candidates)
    step()
    once = list(passes)
    passes.clear()
    dot_kernel.device_caches.clear()
    again = dots(*candidates)
    again()
    facts = [(each.shared_bytes, each.n_regs) for each in step.records[0].candidates]
    return failures(step), facts, launched, once, passes, failures(again), facts


@pytest.mark.parametrize("who", [further([0, 1]), [1]])
def test_what_does_not_fit_is_dropped_before_any_launch(who: list[int]):
    """On one rank or all: on all ranks, with the reason and the need in record and log; where nobody has room it is not assembled."""
    outcomes = on_fake(2, _too_large, who)
    for failed, facts, launched, once, passes, again, facts_again in values(outcomes):
        for failure in (*failed[:2], *again[:2]):
            assert "OutOfResources: out of resource: shared memory, Required: 32768, Hardware limit: 32767" in failure
        assert (failed[2], again[2]) == (None, None)
        assert [shared for shared, _ in facts] == [32768, 32768, 2048]
        assert facts_again == facts
        assert set(launched) == {2048} or who == [1]
        assert passes == []  # the second tuning finds all on disk
        if who == [0, 1]:
            assert 32768 not in once
            assert facts[2] == (2048, 64)
            assert facts[0] == (32768, None)
    assert all("dropped: rank" in outcome.log for outcome in outcomes)


def _stuck(rank: int, block: int) -> Any:
    def listener(*, src: Any, **facts: Any) -> None:
        if rank == 1 and block in src.constants.values():
            threading.Event().wait()

    triton.knobs.compilation.listener = listener
    make_ptx = CUDABackend.make_ptx
    step = tuned(autotuned(blocks=(16, 32, 64)))
    step(torch.zeros(64))
    is_restored = CUDABackend.make_ptx is make_ptx and _async_compile.active_mode.get() is None
    return failures(step), is_restored, in_memory(add_kernel)


@pytest.mark.once
@pytest.mark.parametrize("block", [further(16), 32])
def test_a_compilation_that_never_ends_is_dropped_on_all_ranks(block: int):
    """The first launch waits for it on one rank, or no launch does; after the deadline it has failed for a reason."""
    for failed, is_restored, kernels in values(on_fake(2, _stuck, block, DIST_TUNE_DEADLINE_S="2")):
        assert "TimeoutError: has been compiling for" in failed.pop((16, 32, 64).index(block))
        assert failed == [None, None]
        assert is_restored
        assert set(kernels) == {"CompiledKernel"}


def _tuned_in_the_world(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    tuned(kernel)(torch.zeros(64))
    return len(best(kernel))


def test_an_empty_local_world_size_counts_as_none():
    """As a launcher leaves it that sets what it does not know."""
    assert values(on_ranks(2, _tuned_in_the_world, env={"LOCAL_WORLD_SIZE": ""})) == [1, 1]
