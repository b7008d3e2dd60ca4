"""What later jobs take from the cache where all ranks see the same folder, with both tuners."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.testing import ExactTime
from tests.ranks.jobs import FACES, RUNS, Face, edited, is_hit, is_tuned, job, records
from tests.steps import accumulate_kernel, autotuned, best, launch, names, tuned
from tests.worlds import log, on_each_rank


@on_each_rank(cases=FACES)
def test_a_second_job_hits_on_all_ranks(rank: int, face: Face):
    """No replay, no tuning in the log, and the winner where the next call finds it. A process alone has records of its own."""
    assert is_tuned(job(face))
    edited(rank, winner=32)
    before = len(log())
    assert is_hit(job(face), 32)
    assert re.search(r": BLOCK=32\b.*, from the cache, tuned 2", log()[before:])
    assert not any(word in log()[before:] for word in ("searches in", " on 2 ranks: ", "dropped"))
    if face == "contextual":
        alone = [job(face, is_dist=False).is_hit for _ in range(2)]
        assert alone[-1]
        assert job(face).is_hit
        assert sorted(each.environment.world_size for each in records()) == [1, 2]


@on_each_rank()
def test_a_new_key_in_a_later_call_hits_without_a_replay(rank: int):
    """The miss comes in the midst of an ordinary call, on all ranks: one meeting, and the closure has run once."""
    for size in (64, 128):
        job("contextual", n=size)
    edited(rank, winner=32)
    n, runs, kernel = [64], list[int](), autotuned()

    def closure() -> float:
        runs.append(1)
        y = launch(kernel, torch.zeros(n[0]))
        dist.all_reduce(y)
        return y[0].item()

    step = tuned(kernel, closure)
    got = [step()]
    n[0] = 128
    got += [step(), step()]
    assert (got, len(runs), best(kernel)) == ([2.0] * 3, 3, [32, 32])
    assert [each.is_recalled for each in step.records] == [True, True]


@on_each_rank()
def test_where_one_kernel_hits_the_others_are_tuned(rank: int):
    """The one with a record runs its config in all replays; both are there for the next job."""
    job("contextual", blocks=(16, 32))
    edited(rank, winner=32)
    winners = []
    for is_second in (False, True):
        first, second, runs = autotuned(blocks=(16, 32)), autotuned(accumulate_kernel), list[int]()

        def closure(x: torch.Tensor, first: Any = first, second: Any = second, runs: list[int] = runs) -> torch.Tensor:
            runs.append(1)
            return launch(second, launch(first, x), torch.ones(64))

        step = tuned(None, closure)
        assert step(torch.zeros(64))[0].item() == 2.0
        assert names(step) == [("accumulate_kernel", is_second), ("add_kernel", True)]
        assert (len(runs) > 3, len(runs) == 1) == (not is_second, is_second)
        winners.append((best(first), best(second)))
        dist.barrier()
    assert winners[0] == winners[1]
    assert winners[0][0] == [32]


@on_each_rank()
def test_a_kernel_made_anew_in_every_call_hits_in_every_call(rank: int):
    """Instead of a tuning for each; its record is listed once, however many calls there are. From the third on no rank asks another."""
    job("contextual")
    edited(rank, winner=64)
    made: list[Any] = []
    before = log().count("meeting='manifest'")

    def closure(x: torch.Tensor) -> torch.Tensor:
        made.append(autotuned())
        return launch(made[-1], launch(made[-1], x))

    step = tuned(None, closure)
    assert [step(torch.zeros(64))[0].item() for _ in range(5)] == [2.0] * 5
    assert ([best(kernel) for kernel in made], len(step.records)) == ([[64]] * 5, 1)
    assert log().count("meeting='manifest'") - before == 2


@on_each_rank()
def test_a_kernel_whose_cache_is_cleared_is_tuned_each_time(rank: int):
    """It is no kernel that is made anew."""
    kernel = autotuned(blocks=(16, 32))
    step = tuned(kernel, lambda x: launch(kernel, x), cache=False)
    for n in range(1, 5):
        step(torch.zeros(64))
        assert len(step.records) == n
        kernel.cache.clear()


def _draw() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def _drawing(x: torch.Tensor, *, BLOCK: int) -> tuple[float, ...]:
    return _draw()


@on_each_rank()
def test_random_state_after_a_hit_is_as_without_a_tuner(rank: int):
    def calls(is_tuned: bool) -> list[Any]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        kernel = autotuned()
        if not is_tuned:
            kernel.cache[(64, "torch.float32", "torch.float32")] = kernel.configs[0]

        def closure(x: torch.Tensor) -> tuple[float, ...]:
            launch(kernel, x)
            return _draw()

        step = tuned(kernel, closure) if is_tuned else closure
        space = [{"BLOCK": block} for block in (16, 32)]
        function = autotune(space, lambda x: x.numel())(_drawing) if is_tuned else partial(_drawing, BLOCK=16)
        x = torch.zeros(64)
        return [step(x), _draw(), function(x), _draw()]

    calls(True)
    dist.barrier()
    assert calls(True) == calls(False)


@on_each_rank(cases=["restore_value", "reset_to_zero"])
def test_a_hit_neither_restores_nor_zeroes(rank: int, name: str):
    """``restore_value`` and ``reset_to_zero`` are for trials; a hit has none, and a kernel that is launched twice adds up."""
    for is_recalled in (False, True):
        options: dict[str, Any] = {name: ["y_ptr"]}
        kernel, total = autotuned(accumulate_kernel, **options), torch.full((64,), 5.0)

        def closure(x: torch.Tensor, kernel: Any = kernel, total: torch.Tensor = total) -> float:
            if name == "reset_to_zero":
                total.zero_()
            launch(kernel, x, total)
            launch(kernel, x, total)
            return total[0].item()

        step = tuned(kernel, closure)
        assert step(torch.ones(64)) == total[0].item() == (7.0 if name == "restore_value" else 2.0)
        assert step.records[0].is_recalled == is_recalled
        dist.barrier()


@on_each_rank()
def test_nothing_is_kept_of_a_tuning_without_a_result(rank: int):
    """No config is valid; a rank leaves in the first run, in a replay, in the last run."""

    def fails(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
        raise ValueError("never")

    assert job("function", function=fails).error.kind == "NoValidConfigError"
    for last in (1, 3, 5):
        runs, kernel = list[int](), autotuned()

        def closure(x: torch.Tensor, last: int = last, runs: list[int] = runs, kernel: Any = kernel) -> None:
            runs.append(1)
            launch(kernel, x)
            if len(runs) == last and rank == 1:
                raise ValueError("left")

        with pytest.raises(Exception, match="left") as raised:
            tuned(None, closure)(torch.zeros(64))
        assert type(raised.value).__name__ == ["PeerFailedError", "ValueError"][rank]
    dist.barrier()
    assert records() == []


# -- other spaces ------------------------------------------------------------------------------------------------------


def _timed_work(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
    RUNS.append(BLOCK)
    ExactTime.pass_ms(1e3 / BLOCK)  # as the kernel, a block that is twice as large is twice as fast
    return x + 1.0


def timed(face: Face, *blocks: int, **settings: str) -> tuple[int, set[int], bool]:
    """A job of these candidates: its winner, the blocks that ran after the first run and the probe, whether there was a race."""
    launched: list[int] = []
    kernel = autotuned(blocks=blocks)
    run = kernel.run

    def counting(*args: Any, grid: Any, **options: Any) -> Any:
        def counted(meta: dict[str, Any]) -> Any:
            launched.append(meta["BLOCK"])
            return grid(meta)

        return run(*args, grid=counted, **options)

    kernel.run = counting
    done = job(face, settings=settings, kernel=kernel, blocks=blocks, function=_timed_work)
    ran = Counter(launched[:-1] if face == "contextual" else RUNS[: done.n_runs])
    ran[(launched if face == "contextual" else RUNS)[0]] -= 2
    return done.winner, {block for block, n in ran.items() if n > 0}, done.record.spent.race > 0


@on_each_rank(cases=FACES)
def test_a_space_that_has_changed_is_tuned_as_far_as_it_is_new(rank: int, face: Face):
    """A slow new config changes nothing and a fast one wins; those that had lost are not run again.

    In another order, or smaller, the winner stands without a race while it is a candidate; without it the others are measured.
    """
    assert timed(face, 8, 32, 16)[0] == 32
    assert timed(face, 16, 32, 8) == (32, {32}, False)
    assert timed(face, 8, 32) == (32, {32}, False)
    assert timed(face, 8, 16) == (16, {8, 16}, True)
    assert timed(face, 8, 32, 16, 4) == (32, {32, 4}, True)
    assert timed(face, 8, 32, 16, 4, 64) == (64, {32, 64}, True)
