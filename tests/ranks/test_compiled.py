"""Compilation by ranks: who compiles what, what is dropped, equal kernels, what stays loaded, other
devices. Real code, mostly of sm_90.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import max_shared_mem
from triton.runtime import _async_compile
from triton.runtime.driver import driver

from dist_tune import autotune, contextual_autotune
from dist_tune.search import Report, reduce_reports
from dist_tune.testing import FakeH200
from dist_tune.tuning.compiling import equals as same_kernels
from tests.steps import (
    Job,
    add_kernel,
    autotuned,
    best,
    configs,
    constants_of,
    dot_kernel,
    edited,
    failures,
    gemm_kernel,
    launch,
    records,
    shift_kernel,
    tuned,
)
from tests.worlds import further, gathered, log, on_each_rank

once = pytest.mark.once
on_one: Any = {"n": 1, "modes": ["fake"]}


def fresh(kernel: Any = add_kernel, *blocks: int, **options: Any) -> Any:
    """Autotuned, with nothing in its memory."""
    return autotuned(triton.jit(kernel.fn), blocks or (16, 32, 64), **options)


def in_memory(kernel: Any) -> set[str]:
    """What kinds of things are in Triton's cache of a kernel."""
    return {type(each).__name__ for each in kernel.fn.device_caches[0][0].values()}


def compiled() -> list[int]:
    """From here on, the block sizes of what this rank compiles and does not find on disk."""
    blocks: list[int] = []

    def listener(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        if not cache_hit:
            blocks.append(constants_of(src)["BLOCK"])

    triton.knobs.compilation.listener = listener
    return blocks


# -- who compiles what -----------------------------------------------------------------------------


@once
@on_each_rank(modes=["fake"], cases=["one folder", "a folder each", "a kernel each"])
def test_each_distinct_kernel_is_compiled_once_for_a_cache_folder(rank: int, case: str):
    """The ranks share the work out, for two keys as for one, and each loads all.

    An integer that is 1 on one rank is part of the kernel.
    """
    os.environ["TRITON_CACHE_DIR"] += f"/{rank}" * (case == "a folder each")
    blocks, kernel, x = compiled(), fresh(shift_kernel, 16, 32, 64, 128), torch.zeros(64)
    shift = 1 if case == "a kernel each" and rank else 3 + 2 * rank
    step = tuned(None, lambda: [kernel[(1,)](x, x, n, shift) for n in (64, 128)])
    step()
    # Each rank launches the first candidate at once: both may compile it.
    assert sorted(block for each in gathered(blocks) for block in each if block != 16) == sorted(
        [32, 64, 128] * (1 + (case != "one folder"))
    )
    assert [[each.n_regs for each in record.candidates] for record in step.records] == [
        [64] * 4
    ] * 2
    assert (in_memory(kernel), len(kernel.fn.device_caches[0][0])) == ({"CompiledKernel"}, 4)


@once
@on_each_rank(modes=["fake"])
def test_a_cache_that_cannot_be_written_is_named(rank: int):
    """Each rank compiles for itself; the first says what is wrong, and each has it in its log.

    An empty ``LOCAL_WORLD_SIZE``, as some launchers leave it, counts as none.
    """
    os.environ.update(TRITON_CACHE_DIR="/dev/null/cache", LOCAL_WORLD_SIZE="")
    text = "Triton's cache folder /dev/null/cache cannot be written (Not a directory)"
    with pytest.warns(UserWarning, match=re.escape(text)) if rank == 0 else nullcontext():
        tuned(fresh())(torch.zeros(64))
    assert log().count(text) == 1


@once
@on_each_rank(**on_one)
def test_threads_compile_beside_the_first_run(rank: int):
    """The closure's own Python goes on, and before it returns all candidates are compiled."""
    blocks, kernel, seen = compiled(), fresh(), list[int]()

    def closure() -> None:
        launch(kernel, torch.zeros(64))
        end = time.monotonic() + 60
        while len(blocks) < 3 and time.monotonic() < end:
            sum(range(1000))  # the closure's own Python
        seen.append(len(blocks))

    tuned(None, closure)()
    assert seen[0] == 3


@once
@on_each_rank(modes=["fake"])
def test_a_hit_compiles_its_config_alone(rank: int):
    """With nothing on disk but the record: one kernel on each rank; resource facts of all
    candidates are in the record.
    """
    add_kernel.device_caches.clear()
    Job("contextual")
    edited(rank, winner=64)
    (record,) = records()
    assert [(each.shared_bytes, each.n_regs, each.n_spills) for each in record.candidates] == [
        (0, 64, 0)
    ] * 3
    os.environ["TRITON_CACHE_DIR"] += f"/of a second job on rank {rank}"
    add_kernel.device_caches.clear()
    blocks, again = compiled(), Job("contextual")
    assert (again.how, blocks) == ("hit 64", [64])
    assert [each.n_regs for each in again.record.candidates] == [64] * 3


# -- what is dropped -------------------------------------------------------------------------------


@once
@on_each_rank(modes=["fake"], cases=[[0, 1], [1]])
def test_what_does_not_fit_is_dropped_before_any_launch(rank: int, who: list[int]) -> Any:
    """On one rank or all: on all ranks, with the reason and the need in record and log; where no
    rank has room it is not assembled.
    """
    launched, x = set[int](), torch.zeros(64, dtype=torch.float16)
    max_shared_mem.cache_clear()
    FakeH200.launch_ms = staticmethod(lambda source, metadata: launched.add(metadata.shared) or 0.0)  # type: ignore[func-returns-value]
    with pytest.MonkeyPatch.context() as patch:
        if rank in who:
            patch.setattr(FakeH200, "shared_limit_bytes", 32767)
        for _ in range(2):  # the second one finds all on disk
            kernel = fresh(dot_kernel, 128, 32)
            step = tuned(None, lambda kernel=kernel: kernel[(1,)](x, x, 64))
            step()
            large, small = failures(step)
            assert (
                "OutOfResources: out of resource: shared memory, Required: 32768, Hardware limit:"
                " 32767" in str(large)
            )
            assert small is None
            facts = [(each.shared_bytes, each.n_regs) for each in step.records[0].candidates]
            assert facts == [(32768, None if who == [0, 1] else facts[0][1]), (2048, 64)]
    max_shared_mem.cache_clear()
    assert launched == {2048} or (who, rank) == ([1], 0)
    assert "dropped: rank" in log()
    return facts


@once
@on_each_rank(modes=["fake"], cases=[16, 32])
def test_a_compilation_that_never_ends_is_dropped_on_all_ranks(rank: int, block: int):
    """The first launch waits for it on one rank, or no launch does; after the deadline it has
    failed for a reason.
    """
    tuned(fresh())(torch.zeros(64))  # the others are on disk, and take no time that counts
    os.environ["DIST_TUNE_DEADLINE_S"] = "3"
    make_ptx, kernel = CUDABackend.make_ptx, fresh()

    def listener(*, src: Any, **facts: Any) -> None:
        if rank == 1 and block == constants_of(src)["BLOCK"]:
            threading.Event().wait()

    triton.knobs.compilation.listener = listener
    step = tuned(kernel, cache=False)
    step(torch.zeros(64))
    failed = failures(step)
    assert "TimeoutError: has been compiling for" in str(failed.pop((16, 32, 64).index(block)))
    assert failed == [None, None]
    assert (
        CUDABackend.make_ptx is make_ptx,
        _async_compile.active_mode.get(),
        in_memory(kernel),
    ) == (True, None, {"CompiledKernel"})


# -- what is left behind ---------------------------------------------------------------------------


def state() -> Any:
    """What a tuning changes while it compiles; waits for its threads to end."""
    end = time.monotonic() + 30
    while (
        any(each.name.startswith("dist_tune compiler") for each in threading.enumerate())
        and time.monotonic() < end
    ):
        time.sleep(0.01)
    mode, n_files = _async_compile.active_mode.get(), len(os.listdir("/proc/self/fd"))
    return CUDABackend.make_ptx, mode, sys.stdout, sys.stderr, os.fstat(2).st_ino, n_files


@once
@on_each_rank(**on_one, is_dist=False, cases=["nothing", "KeyError", "KeyboardInterrupt"])
def test_triton_and_the_terminal_are_left_as_found(rank: int, what: str):
    """After a tuning; after an error of the first run while threads compile; after Ctrl-C while a
    launch waits for its kernel.
    """
    before, kernel, goes_on = state(), fresh(), threading.Event()

    def closure(x: torch.Tensor) -> None:
        launch(kernel, x)
        if what == "KeyError":
            raise KeyError("in the first run")

    def interrupt(*, src: Any, **facts: Any) -> None:
        if constants_of(src)["BLOCK"] == 16:
            os.kill(os.getpid(), signal.SIGINT)
            goes_on.wait(60)

    if what == "KeyboardInterrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        triton.knobs.compilation.listener = interrupt
    step = tuned(None, closure, is_dist=False)
    try:
        step(torch.zeros(64))
        raised = "nothing"
    except (KeyError, KeyboardInterrupt) as error:
        raised = type(error).__name__
    goes_on.set()
    assert (raised, state()) == (what, before)
    assert in_memory(kernel) <= {"CompiledKernel"}


@once
@on_each_rank(**on_one, is_dist=False)
def test_two_tunings_in_two_threads(rank: int):
    """Both compile at once, one after the other goes on, and the last to leave restores all."""
    before, both = state(), threading.Barrier(2, timeout=60)
    kernels, x, runs = (
        (fresh(add_kernel, 16, 32), fresh(shift_kernel, 16, 32)),
        torch.zeros(64),
        [0, 0],
    )

    def tune(number: int) -> None:
        def closure() -> None:
            kernels[number][(1,)](x, x, 64, *[7] * number)
            runs[number] += 1
            if runs[number] == 1:
                both.wait()  # both compile

        tuned(None, closure, is_dist=False)()

    threads = [threading.Thread(target=tune, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ([len(best(kernel)) for kernel in kernels], state() == before) == ([1, 1], True)


class Modules:
    """The modules on the device, as Triton 3.9 and later unload those of kernels that are freed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n_loaded, self.unloaded = 0, list[int]()
        patch.setattr(FakeH200.utils, "load_binary", self.load, raising=False)
        patch.setattr(FakeH200.utils, "unload_module", self.unloaded.append, raising=False)

    def load(self, *given: Any) -> tuple[int, int, int, int, int]:
        self.n_loaded += 1
        return self.n_loaded, 2, 64, 0, 1024


@on_each_rank(**on_one)
def test_no_kernel_is_unloaded_while_its_function_lives(rank: int):
    """As a CUDA graph needs it: one that lost, and one that the step launches by itself, at two
    keys and under capture.
    """
    kernel, own = fresh(), list[Any]()

    @contextual_autotune(is_dist=True)
    def step(x: torch.Tensor) -> None:
        y = launch(kernel, x)
        own.extend(
            id(kernel.fn[(1,)](x, y, x.numel(), **config.all_kwargs())) for config in kernel.configs
        )

    with pytest.MonkeyPatch.context() as patch:
        modules = Modules(patch)
        for n in (64, 128):
            step(torch.zeros(n))
            gc.collect()
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        step(torch.zeros(64))
        gc.collect()
        assert (modules.n_loaded >= 3, modules.unloaded, len({*own})) == (True, [], 3)


# -- candidates that come to the same kernel -------------------------------------------------------

STAGES = (1, 2, 3, 4)
EQUAL = [None, 0, 0, 0, None, 4, 4, 4]


@triton.jit
def rank_loop_kernel(x_ptr, y_ptr, n_steps, BLOCK: tl.constexpr):
    """With ``n_steps`` 1, a constant, there is no loop, and nothing is pipelined."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    sum = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(n_steps):
        x = tl.load(x_ptr + k * BLOCK * BLOCK + at)
        sum += tl.dot(x, x)
    tl.store(y_ptr + at, sum)


def staged(*blocks: int) -> list[triton.Config]:
    return [
        config
        for block in blocks
        for stages in STAGES
        for config in configs(block, num_stages=stages)
    ]


def looping(
    n_steps: int, ms: Callable[[int], float] = lambda stages: 1.0
) -> tuple[Callable[[], Any], set[int]]:
    """A launch of the loop with four stages, and those that are launched."""
    kernel, stages = fresh(rank_loop_kernel, configs=staged(32), key=("BLOCK",)), set[int]()
    x, y = torch.zeros(4 * 32 * 32, dtype=torch.float16), torch.zeros(32 * 32)

    def launch_ms(source: Any, metadata: Any) -> float:
        stages.add(metadata.num_stages)
        return ms(metadata.num_stages)

    FakeH200.launch_ms = staticmethod(launch_ms)
    return lambda n=n_steps: kernel[(1,)](x, y, n), stages


def launched(ms: Callable[[int], float] = lambda block: 50.0 if block == 16 else 1.0) -> set[int]:
    """From here on, the stages of kernels that are launched; a launch takes the time of its
    block.
    """
    stages: set[int] = set()

    def launch_ms(source: Any, metadata: Any) -> float:
        stages.add(metadata.num_stages)
        return ms(constants_of(source)["BLOCK"])

    FakeH200.launch_ms = staticmethod(launch_ms)
    return stages


def raced(kernel: Any, closure: Any = None, **options: Any) -> Any:
    """The record of a tuning."""
    step = tuned(kernel, closure or (lambda: launch(kernel, torch.zeros(64))), **options)
    step()
    (record,) = step.records
    return record


def equal_to(record: Any) -> list[int | None]:
    return [each.equal_to for each in record.candidates]


def fates() -> dict[str, int]:
    """Kernels by what became of them, in the tunings of this body so far."""
    found: dict[str, int] = {}
    for line in re.findall(r"kernels: (.*?) cpu_seconds", log()):
        for name, n in re.findall(r"(\w+)=(\d+)", line):
            found[name] = found.get(name, 0) + int(n)
    return found


@on_each_rank(**on_one, cases=["racing", "exhaustive"])
def test_stages_without_effect_are_one_candidate(rank: int, search: Any):
    """Eight configs, two kernels: each goes through LLVM and ptxas once; the lowest index races,
    and its times are all four's.
    """
    stages, kernel = launched(), fresh(configs=staged(16, 32))
    record = raced(kernel, search=search, n_repeat=2)
    assert fates() == {"compiled": 2, "equal": 6, "on_disk": 0, "failed": 0}
    assert (equal_to(record), stages, record.winner) == (EQUAL, {1}, 4)
    times_ms = [each.latency_ms for each in record.candidates]
    assert times_ms == [times_ms[0]] * 4 + [times_ms[4]] * 4
    assert len({ms[0] for ms in list(kernel.configs_timings.values())[4:]}) == 1
    assert [each.n_regs for each in record.candidates] == [64] * 8
    assert "6 of 8 candidates are the same kernel as another" in log()
    assert log().count("the same kernel as candidate 4") == 3


@on_each_rank(**on_one, cases=["in processes", "in threads"], is_alone=True)
def test_what_is_compiled_is_what_triton_alone_makes(rank: int, where: str):
    """To the byte, under the same keys, on disk and where Triton makes it anew: pipelined loops,
    and kernels that are equal to another.
    """
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    products = [
        triton.Config({"BM": 16, "BN": n}, num_stages=stages) for n in (16, 32) for stages in (1, 2)
    ]
    kernels = [
        fresh(configs=staged(16)),
        triton.autotune(products, key=[])(triton.jit(gemm_kernel.fn)),
    ]
    launches: list[Any] = [(kernels[0].fn, (x, x, 64)), (kernels[1].fn, (x, x, x.float(), 64))]
    step = tuned(
        None,
        lambda: [kernel[(1,)](*args) for kernel, (_, args) in zip(kernels, launches, strict=True)],
    )

    def contents() -> Any:
        found = {
            key: each for kernel, _ in launches for key, each in kernel.device_caches[0][0].items()
        }
        return {
            key: (each.asm["ptx"], each.asm["cubin"], each.metadata, each.packed_metadata)
            for key, each in found.items()
        }

    with pytest.MonkeyPatch.context() as patch:
        if where == "in threads":  # none starts
            patch.setattr(sys, "executable", "/no/such/python")
        step()
    ours, hits = contents(), list[bool]()
    assert ("compiled=5 equal=3" in log(), len(ours)) == (True, 8)
    triton.knobs.compilation.listener = lambda *, cache_hit, **facts: hits.append(cache_hit)
    for _ in range(2):
        for kernel, (function, args) in zip(kernels, launches, strict=True):
            function.device_caches[0][0].clear()
            for config in kernel.configs:
                function[(1,)](*args, **config.all_kwargs())
        assert contents() == ours
        os.environ["TRITON_CACHE_DIR"] += "-anew"
    assert hits == [True] * 8 + [False] * 8


@once
@on_each_rank(modes=["fake"], cases=[[1, 4], further([1, 1])])
def test_candidates_are_equal_if_they_are_on_all_ranks(rank: int, case: list[int]):
    """One step on rank 0 makes one kernel of the four stages; on rank 1 they differ, so all race on
    both. One on both: nothing to race.
    """
    step, _ = looping(case[rank])
    record, is_equal = raced(None, step), case == [1, 1]
    assert equal_to(record) == ([None, 0, 0, 0] if is_equal else [None] * 4)
    assert [each.n_replays > 0 for each in record.candidates] == [not is_equal] * 4


@once
@on_each_rank(**on_one, cases=[[1, 4], [4, 1]])
def test_candidates_are_equal_if_they_are_in_each_launch(rank: int, lengths: list[int]):
    """Stages matter in the second launch of a run alone, or in the first: all race."""
    step, _ = looping(0, {1: 6.0, 2: 4.0, 3: 1.0, 4: 2.0}.__getitem__)
    record = raced(None, lambda: [step(n) for n in lengths])  # type: ignore[call-arg]
    assert record.best.fields["num_stages"] == 3


@once
@on_each_rank(modes=["fake"])
def test_a_rank_that_comes_late_runs_what_races_for_others(rank: int):
    """Rank 1 meets the kernel after the first run, and finds one kernel where rank 0 has four: it
    launches what rank 0 is timed with.
    """
    (step, stages), n_runs = looping(1 if rank else 4), 0

    def closure() -> None:
        nonlocal n_runs
        n_runs += 1
        if rank == 0 or n_runs > 1:
            step()

    assert (equal_to(raced(None, closure, n_repeat=2)), stages) == ([None] * 4, {*STAGES})


@once
@on_each_rank(modes=["fake"])
def test_two_ranks_assemble_few_of_equal_kernels(rank: int):
    """The four stages of a block stay together, so that one rank makes them all, but for those that
    the other one takes at the end.
    """
    launched()
    record = raced(fresh(configs=staged(16, 32)))
    n_made = torch.tensor(fates()["compiled"])
    dist.all_reduce(n_made)
    assert (n_made.item() <= 4, equal_to(record)) == (True, EQUAL)


@once
@on_each_rank(**on_one)
def test_where_the_first_fails_its_equals_fail_alike(rank: int):
    """It is launched once, and its equals never."""
    tried: list[int] = []

    def fail(block: int) -> float:
        if block == 32:
            tried.append(block)
            raise RuntimeError("does not launch")
        return 0.1

    launched(fail)
    record = raced(fresh(configs=staged(16, 32)))
    reason = "rank 0: RuntimeError: does not launch"
    assert (len(tried), record.winner) == (1, 0)
    assert [each.failure for each in record.candidates] == [None] * 4 + [reason] + [
        f"the same kernel as candidate 4: {reason}"
    ] * 3


@once
@on_each_rank(**on_one)
def test_records_of_other_candidate_lists_are_used(rank: int):
    """Reversed, the winner of before is equal to one in front of it; more candidates; and the first
    list again, from the cache.
    """
    launched()
    lists = (staged(16, 32), staged(16, 32)[::-1], staged(16, 32, 64), staged(16, 32))
    found = [raced(autotuned(configs=each)) for each in lists]
    assert [(each.is_recalled, each.best.equal_to, len(each.candidates)) for each in found] == [
        (False, None, 8),
        (False, None, 8),
        (False, None, 12),
        (True, None, 8),
    ]
    assert [found[i].best.fields["BLOCK"] for i in (0, 1, 3)] == [32] * 3


@once
@on_each_rank(**on_one)
def test_what_a_search_did_not_try_is_equal_to_nothing(rank: int):
    """All kernels are in memory from another key, also those that a guided search does not come
    to.
    """
    options = [
        {"num_warps": n, "num_stages": stages, "maxnreg": regs}
        for stages in STAGES
        for n in (2, 4)
        for regs in (64, 255)
    ]
    kernel = fresh(configs=[config for each in options for config in configs(16, 32, 64, **each)])
    for search, n in (("racing", 256), ("guided", 512)):
        record = raced(None, lambda n=n: launch(kernel, torch.zeros(n)), search=search)
    untried = {
        i
        for i, each in enumerate(record.candidates)
        if each.left is not None and "not tried" in each.left
    }
    assert untried
    assert not untried & {*equal_to(record)}


@once
@on_each_rank(**on_one)
def test_configs_of_a_function_stay_apart(rank: int):
    """Three have one kernel, but a function may do anything with its config: all are run."""
    kernel, seen = triton.jit(add_kernel.fn), set[int]()

    def add(x: torch.Tensor, num_stages: int) -> torch.Tensor:
        seen.add(num_stages)
        y = torch.empty_like(x)
        kernel[(4,)](x, y, x.numel(), BLOCK=16, num_stages=num_stages)
        return y

    step = autotune(
        [{"num_stages": stages} for stages in STAGES], lambda x: x.numel(), n_warmup=0, n_repeat=1
    )(add)
    step(torch.zeros(64))
    assert (equal_to(step.records[0]), seen) == ([None] * 4, set(STAGES))


@once
def test_same_kernel_and_config_but_for_stages():
    """Another constant, number of warps or hook makes another launch of the same code; unknown
    kernels are equal to none.
    """
    alike = [config for stages in (1, 2, 3) for config in configs(16, num_stages=stages)]
    assert [
        same_kernels(alike, each) for each in (["k", "k", "k"], ["k", "l", "k"], ["", "", ""])
    ] == [{1: 0, 2: 0}, {2: 0}, {}]
    others = [{}, {"num_warps": 8}, {"maxnreg": 64}, {"num_ctas": 2}]
    different = [
        *configs(32),
        triton.Config({"BLOCK": 16, "PART": 1}),
        *(config for each in others for config in configs(16, **each)),
    ]
    assert same_kernels(different, ["k"] * 6) == {}
    hooked = [
        config
        for stages in (1, 2)
        for config in configs(16, num_stages=stages, pre_hook=lambda args: None)
    ]
    assert same_kernels(hooked, ["k", "k"]) == {}  # the hook is handed the number of stages


@once
@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3))
def test_equal_on_all_ranks_are_those_that_each_has_found_equal(classes: list[list[int]]):
    """For any classes on any ranks; the first of them stands for the others and for itself."""
    rows = [[row.index(kernel) for kernel in row] for row in classes]
    reports = [
        Report(equal={"s": {i: first for i, first in enumerate(row) if i != first}}) for row in rows
    ]
    # The last rank has not met the site.
    equal = reduce_reports(dict(enumerate([*reports, Report()]))).equal["s"]
    first = [equal.get(i, i) for i in range(4)]
    for i in range(4):
        assert first[i] == min(j for j in range(4) if all(row[i] == row[j] for row in rows))
    assert reduce_reports(dict(enumerate([*reports, Report(equal={"s": {}})]))).equal["s"] == {}


# -- other devices ---------------------------------------------------------------------------------


class FakeMI300(FakeH200):
    """The target of an MI300X: wavefronts of 64. Of the rest only its shared memory counts here."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)


@once
@on_each_rank(modes=["fake"], is_alone=True)
def test_a_step_is_tuned_for_an_amd_gpu(rank: int):
    """Compiled in the ranks' own processes, without a tool of NVIDIA's; found again by a key with
    HIP's version.
    """
    started: list[Any] = []
    sys.addaudithook(
        lambda event, args: started.append(args) if event == "subprocess.Popen" else None
    )
    torch.version.hip, FakeH200.shared_limit_bytes = "6.4.2", 65536
    driver.set_active(FakeMI300())
    FakeH200.launch_ms = staticmethod(
        lambda source, metadata: {2: (0.1, 1.0)[rank], 4: 0.5}[metadata.num_warps]
    )
    large = triton.Config({"BM": 256, "BN": 256}, num_warps=4, num_stages=4)
    kernel = triton.autotune(
        [*(triton.Config({"BM": 32, "BN": 32}, num_warps=warps) for warps in (2, 4)), large],
        key=["K"],
    )(gemm_kernel)
    a, c = torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(256, 256)
    step = contextual_autotune(is_dist=True)(lambda: kernel[(1,)](a, a, c, 64))
    step()
    kernel.cache.clear()
    step()
    first, again = step.records
    assert first.best.fields["num_warps"] == 4  # the slowest rank decides
    *fit, failure = failures(step)
    assert (fit, again.is_recalled, again.environment.cuda) == ([None, None], True, "hip 6.4.2")
    assert "shared memory, Required: 98304, Hardware limit: 65536" in str(failure)
    made = {path.suffix for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.*")}
    assert made & {".hsaco", ".amdgcn", ".ptx", ".cubin", ".so"} == {".hsaco", ".amdgcn"}
    assert started == []
