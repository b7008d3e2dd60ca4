"""Candidates that come to the same kernel: compiled once, raced once, and named in the record. Real sm_90 code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from dist_tune import autotune
from dist_tune.search import Report, reduce_reports
from dist_tune.testing import FakeH200
from dist_tune.tuning.compilation import equals as same_kernels
from tests.steps import add_kernel, autotuned, launch, tuned
from tests.worlds import log, on_each_rank

STAGES = (1, 2, 3, 4)
EQUAL = [None, 0, 0, 0, None, 4, 4, 4]
on_one: Any = {"n": 1, "modes": ["fake"]}


@triton.jit
def rank_loop_kernel(x_ptr, y_ptr, n_steps, BLOCK: tl.constexpr):
    """With ``n_steps`` 1, a constant, there is no loop, and nothing is pipelined."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    sum = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(n_steps):
        x = tl.load(x_ptr + k * BLOCK * BLOCK + at)
        sum += tl.dot(x, x)
    tl.store(y_ptr + at, sum)


def fates() -> dict[str, int]:
    """Kernels by what became of them, in the tunings of this body so far."""
    found: dict[str, int] = {}
    for line in re.findall(r"kernels: (.*?) cpu_seconds", log()):
        for name, n in re.findall(r"(\w+)=(\d+)", line):
            found[name] = found.get(name, 0) + int(n)
    return found


def launched(ms: Callable[[int], float] = lambda block: 50.0 if block == 16 else 1.0) -> list[int]:
    """From here on, the stages of each kernel that is launched; a launch takes the time of its block."""
    stages: list[int] = []

    def launch_ms(src: Any, metadata: Any) -> float:
        took = ms(src.constants[(src.fn.arg_names.index("BLOCK"),)])
        stages.append(metadata.num_stages)
        return took

    FakeH200.launch_ms = staticmethod(launch_ms)
    return stages


def staged(*blocks: int) -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}, num_stages=stages) for block in blocks for stages in STAGES]


def fresh(*blocks: int) -> Any:
    """A kernel of which nothing is in memory."""
    return autotuned(triton.jit(add_kernel.fn), configs=staged(*blocks))


def raced(kernel: Any, closure: Any = None, **options: Any) -> Any:
    """The record of a tuning."""
    step = tuned(kernel, closure or (lambda: launch(kernel, torch.zeros(64))), **options)
    step()
    (record,) = step.records
    return record


def equal_to(record: Any) -> list[int | None]:
    return [each.equal_to for each in record.candidates]


@on_each_rank(**on_one, cases=[{}, {"search": "exhaustive"}, {"n_repeat": 3, "n_warmup": 1}])
def test_stages_without_effect_are_one_candidate(rank: int, case: dict[str, Any]):
    """Eight configs, two kernels: each goes through LLVM and ptxas once; the lowest index races, and its times are all four's."""
    stages, kernel = launched(), fresh(16, 32)
    record = raced(kernel, **case)
    assert fates() == {"compiled": 2, "equal": 6, "on_disk": 0, "failed": 0}
    assert (equal_to(record), set(stages), record.winner) == (EQUAL, {1}, 4)
    times_ms = [each.latency_ms for each in record.candidates]
    assert times_ms == [times_ms[0]] * 4 + [times_ms[4]] * 4
    timings = [ms[0] for ms in kernel.configs_timings.values()]
    assert timings[4:] == [timings[4]] * 4
    assert all(each.n_regs == 64 for each in record.candidates)
    assert "6 of 8 candidates are the same kernel as another" in log()
    assert log().count("the same kernel as candidate 4") == 3


@on_each_rank(**on_one)
def test_what_is_taken_over_is_what_triton_alone_makes(rank: int):
    """Each key has all its files on disk, to the byte, and the metadata of its own config, also where Triton makes them anew."""
    kernel = fresh(16, 32)
    raced(kernel)
    cache, hits = kernel.fn.device_caches[0][0], list[bool]()

    def contents() -> Any:
        return {key: ({**each.asm}, each.metadata, each.packed_metadata) for key, each in cache.items()}

    ours = contents()
    triton.knobs.compilation.listener = lambda *, cache_hit, **facts: hits.append(cache_hit)
    for _ in range(2):
        cache.clear()
        for config in staged(16, 32):
            launch(autotuned(kernel.fn, configs=[config]), torch.zeros(64))
        assert contents() == ours
        os.environ["TRITON_CACHE_DIR"] += "-anew"
    assert hits == [True] * 8 + [False] * 8
    assert sorted(each.metadata.num_stages for each in cache.values()) == sorted(STAGES * 2)


@pytest.mark.once
@on_each_rank(modes=["fake"], cases=[[1, 4], [1, 1]])
def test_candidates_are_equal_if_they_are_on_all_ranks(rank: int, case: list[int]):
    """One step on rank 0 makes one kernel of the four stages; on rank 1 they differ, so all race on both. One on both: nothing to race."""
    kernel = autotuned(rank_loop_kernel, configs=staged(32), key=("BLOCK",))
    x, y = torch.zeros(4 * 32 * 32, dtype=torch.float16), torch.zeros(32 * 32)
    record = raced(kernel, lambda: kernel[(1,)](x, y, case[rank]))
    is_equal = case == [1, 1]
    assert equal_to(record) == ([None, 0, 0, 0] if is_equal else [None] * 4)
    assert [each.n_replays > 0 for each in record.candidates] == [not is_equal] * 4


@pytest.mark.once
@on_each_rank(modes=["fake"])
def test_a_rank_that_comes_late_runs_what_races_for_others(rank: int):
    """Rank 1 meets the kernel after the first run, and finds one kernel where rank 0 has four: it launches what rank 0 is timed with."""
    asked, runs = launched(lambda block: 1.0), list[int]()
    kernel = autotuned(rank_loop_kernel, configs=staged(32), key=("BLOCK",))
    x, y = torch.zeros(4 * 32 * 32, dtype=torch.float16), torch.zeros(32 * 32)

    def closure() -> None:
        runs.append(1)
        if rank == 0 or len(runs) > 1:
            kernel[(1,)](x, y, 1 if rank else 4)

    record = raced(kernel, closure, n_repeat=2)
    assert (equal_to(record), set(asked)) == ([None] * 4, set(STAGES))


@pytest.mark.once
@on_each_rank(modes=["fake"])
def test_two_ranks_assemble_few_of_equal_kernels(rank: int):
    """The four stages of a block stay together, so that one rank makes them all, but for those that the other one takes at the end."""
    launched()
    record = raced(fresh(16, 32))
    n_made = torch.tensor(fates()["compiled"])
    dist.all_reduce(n_made)
    assert n_made.item() <= 4
    assert equal_to(record) == EQUAL


@pytest.mark.once
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
    record = raced(fresh(16, 32))
    failures = [each.failure for each in record.candidates]
    assert (len(tried), record.winner) == (1, 0)
    reason = "rank 0: RuntimeError: does not launch"
    assert failures == [None] * 4 + [reason] + [f"the same kernel as candidate 4: {reason}"] * 3


@pytest.mark.once
@on_each_rank(**on_one)
def test_records_of_other_candidate_lists_are_used(rank: int):
    """Reversed, the winner of before is equal to one in front of it; more candidates; and the first list again, from the cache."""
    launched()
    lists = (staged(16, 32), staged(16, 32)[::-1], staged(16, 32, 64), staged(16, 32))
    first, reversed_, longer, recalled = (raced(autotuned(configs=each)) for each in lists)
    told = [
        (each.is_recalled, each.best.fields["BLOCK"], each.best.equal_to, len(each.candidates)) for each in (first, reversed_, recalled)
    ]
    assert told == [(False, 32, None, 8), (False, 32, None, 8), (True, 32, None, 8)]
    assert (longer.is_recalled, longer.best.equal_to, len(longer.candidates)) == (False, None, 12)


@pytest.mark.once
@on_each_rank(**on_one)
def test_configs_of_a_function_stay_apart(rank: int):
    """The kernel is compiled once for three of them; but a function may do anything with its config: all are run."""
    kernel, seen = triton.jit(add_kernel.fn), set[int]()

    def add(x: torch.Tensor, num_stages: int) -> torch.Tensor:
        seen.add(num_stages)
        y = torch.empty_like(x)
        kernel[(4,)](x, y, x.numel(), BLOCK=16, num_stages=num_stages)
        return y

    step = autotune([{"num_stages": stages} for stages in STAGES], lambda x: x.numel(), n_warmup=0, n_repeat=1)(add)
    step(torch.zeros(64))
    assert (fates()["compiled"], equal_to(step.records[0]), seen) == (1, [None] * 4, set(STAGES))


# -- found on each rank, and agreed on -------------------------------------------------------------------------------


def config(block: int = 16, **options: Any) -> triton.Config:
    return triton.Config({"BLOCK": block}, **options)


@pytest.mark.once
def test_same_kernel_and_config_but_for_stages():
    """Another constant, number of warps or hook makes another launch of the same code; unknown kernels are equal to none."""
    alike = [config(num_stages=stages) for stages in (1, 2, 3)]
    assert same_kernels(alike, ["k", "k", "k"]) == {1: 0, 2: 0}
    assert same_kernels(alike, ["k", "l", "k"]) == {2: 0}
    assert same_kernels(alike, ["", "", ""]) == {}
    others = [
        config(16),
        triton.Config({"BLOCK": 16, "PART": 1}),
        config(32),
        config(16, num_warps=8),
        config(16, maxnreg=64),
        config(16, num_ctas=2),
    ]
    assert same_kernels(others, ["k"] * 6) == {}
    hooked = [config(num_stages=stages, pre_hook=lambda args: None) for stages in (1, 2)]  # is handed the number of stages
    assert same_kernels(hooked, ["k", "k"]) == {}


@pytest.mark.once
@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3))
def test_equal_on_all_ranks_are_those_that_each_has_found_equal(classes: list[list[int]]):
    """For any classes on any ranks; the first of them stands for the others and for itself."""
    rows = [[row.index(kernel) for kernel in row] for row in classes]
    reports = [Report(equal={"s": {i: first for i, first in enumerate(row) if i != first}}) for row in rows]
    equal = reduce_reports(dict(enumerate([*reports, Report()]))).equal["s"]  # the last rank has not met the site
    first = [equal.get(i, i) for i in range(4)]
    for i in range(4):
        assert first[i] == min(j for j in range(4) if all(row[i] == row[j] for row in rows))
    assert reduce_reports(dict(enumerate([*reports, Report(equal={"s": {}})]))).equal["s"] == {}
