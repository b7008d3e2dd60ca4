"""Candidates whose compilation takes longer than that of all others race when they are there."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

import dist_tune.tuning.tuning
from dist_tune import contextual_autotune
from dist_tune.compiler import pool
from dist_tune.compiler.subprocesses.workers import Worker
from dist_tune.testing import FakeH200, values
from tests.compiler.test_processes import PATIENT, bad_asm_kernel
from tests.ranks.variants import epoch_kernel
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

SLOW_WARPS = 2
SECONDS = 3.0
N_OF_OTHERS = 7
"""Launches that show that the other six candidates race: one in the first run, one of each."""


def slow_compilations(*, wait_for_others: bool = True) -> None:
    """Let those with two warps take longer, in other processes: until the others race, or seconds."""
    ask, slow = Worker.ask, set[int]()

    def slowly(self: Worker, request: Any) -> Any:
        begun, stage, *_ = request
        if begun is not None:
            (slow.add if begun[2].num_warps == SLOW_WARPS else slow.discard)(id(self))
        if stage == "llir" and id(self) in slow:
            end = time.monotonic() + (60.0 if wait_for_others else SECONDS)
            while time.monotonic() < end and not (wait_for_others and len(FakeH200.launches) > N_OF_OTHERS):
                time.sleep(0.05)
        return ask(self, request)

    Worker.ask = slowly  # type: ignore[method-assign]
    pool.MIN_THREADS_FOR_PROCESSES = 1
    dist_tune.tuning.tuning.n_compile_threads = lambda n_ranks_of_host: 4  # type: ignore[attr-defined]


def tune(rank: int, warps: tuple[int, ...], wait_for_others: bool = False, **options: Any) -> Any:
    slow_compilations(wait_for_others=wait_for_others)
    FakeH200.launch_ms = lambda src, metadata: 1.0 if metadata.num_warps == SLOW_WARPS else 4.0
    configs = [triton.Config({"BLOCK": block}, num_warps=n) for block in (64, 128) for n in warps]
    kernel = triton.autotune(configs, key=[])(bad_asm_kernel)
    x = torch.zeros(128, dtype=torch.int32)

    @contextual_autotune(is_dist=True, cache=False, **options)
    def step() -> None:
        kernel[(1,)](x)
        dist.all_reduce(torch.ones(1))

    step()
    FakeH200.launch_ms = lambda src, metadata: 0.0
    (record,) = step.records
    return record.best.fields["num_warps"], [each.latency_ms is not None for each in record.candidates], step.records[0].spent


def test_they_join_a_race_that_has_begun_and_may_win() -> None:
    """Both ranks leave the same two candidates for later, race the others meanwhile, and choose a late one."""
    outcomes = on_ranks(2, tune, (1, SLOW_WARPS, 4, 8), True, mode="fake", env=PATIENT)
    for outcome, (winner, is_timed, spent) in zip(outcomes, values(outcomes), strict=True):
        late = re.search(r"candidates \[(.*)\] are still being compiled, and race later", outcome.log)
        assert late  # on a busy machine others may be late, too
        assert {"1", "5"} <= set(late[1].split(", "))
        assert winner == SLOW_WARPS
        assert is_timed == [True] * 8
        assert spent.race > 0
    for outcome in outcomes:
        lines = outcome.log.splitlines()
        waited = next(k for k, line in enumerate(lines) if re.search("tries [2-7] more of 8 candidates", line))
        assert any("meeting='report'" in line for line in lines[:waited])


def test_a_site_of_which_most_are_late_is_waited_for() -> None:
    """Two candidates of two: there is nothing to race meanwhile."""
    outcomes = on_ranks(2, tune, (SLOW_WARPS,), mode="fake", env=PATIENT)
    for outcome in outcomes:
        assert "race later" not in outcome.log
    assert [value[0] for value in values(outcomes)] == [SLOW_WARPS] * 2


def test_an_exhaustive_search_waits_for_all() -> None:
    """Its schedule is that of the seed: every config, in order."""
    outcomes = on_ranks(2, tune_exhaustive, mode="fake", env=PATIENT)
    assert all("race later" not in outcome.log for outcome in outcomes)
    assert [value[0] for value in values(outcomes)] == [SLOW_WARPS] * 2


def tune_exhaustive(rank: int) -> Any:
    return tune(rank, (1, SLOW_WARPS, 4, 8), search="exhaustive", n_warmup=1, n_repeat=2)


def tune_with_epochs(rank: int) -> Any:
    slow_compilations()
    FakeH200.launch_ms = lambda src, metadata: 1.0 if metadata.num_warps == SLOW_WARPS else 4.0
    configs = [triton.Config({"BLOCK": block}, num_warps=n) for block in (64, 128) for n in (1, SLOW_WARPS, 4, 8)]
    kernel = triton.autotune(configs, key=["n"])(epoch_kernel)
    x, y = torch.zeros(128), torch.zeros(128)

    @contextual_autotune(is_dist=True, cache=False)
    def step() -> None:
        for epoch in (3, 16):
            kernel[(1,)](x, y, 64, epoch)
        dist.all_reduce(torch.ones(1))

    step()
    FakeH200.launch_ms = lambda src, metadata: 0.0
    (record,) = step.records
    return record.best.fields["num_warps"], record.n_replays < 200, [each.latency_ms is not None for each in record.candidates]


def test_they_are_compiled_for_all_variants_before_they_race() -> None:
    """Two classes of an argument in each replay: no replay is thrown away again and again, and a late candidate may win."""
    assert values(on_ranks(2, tune_with_epochs, mode="fake", env=PATIENT)) == [(SLOW_WARPS, True, [True] * 8)] * 2
