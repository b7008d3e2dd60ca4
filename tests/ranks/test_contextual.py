"""What a tuned closure does on real ranks when nothing goes wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.tuning import tuning
from tests.steps import autotuned, best, is_unpatched, launch, tuned
from tests.worlds import log, on_each_rank


@on_each_rank()
def test_several_kernels_in_one_closure(rank: int) -> Any:
    """Both kernels are tuned in the same replays, all ranks agree, and the returned value is that of one clean run."""
    first, second, runs = autotuned(), autotuned(blocks=(32, 64)), list[int]()

    def closure(x: torch.Tensor) -> float:
        runs.append(1)
        y = launch(first, x)
        dist.all_reduce(y)
        return launch(second, y)[0].item()

    step, x = tuned(None, closure, n_repeat=2, n_warmup=1, search="exhaustive"), torch.full((64,), float(rank))
    called = [(step(x), len(runs)) for _ in range(2)]
    n_runs = 2 + 3 * 3 + 1
    assert called == [((1 + 2) + 1, n_runs), ((1 + 2) + 1, n_runs + 1)]
    assert len(step.records) == len(best(first) + best(second)) == 2
    return best(first), best(second)


@on_each_rank()
def test_one_kernel_at_two_keys_with_fresh_tensors_in_every_replay(rank: int) -> Any:
    """Each key is a site of its own, and every replay launches with its own arguments: every output is written."""
    kernel, outputs = autotuned(blocks=(16, 32)), list[list[torch.Tensor]]()

    def closure() -> list[torch.Tensor]:
        outputs.append([launch(kernel, torch.zeros(n)) for n in (64, 128)])
        return outputs[-1]

    assert [y.numel() for y in tuned(None, closure)()] == [64, 128]
    assert len(outputs) == 2 + 2 + 1
    assert all(bool((y == 1).all()) for replay in outputs for y in replay)
    assert len(kernel.cache) == 2
    return best(kernel)


@on_each_rank()
def test_a_steady_call_makes_no_collective_no_store_access_and_no_log_line(rank: int):
    """After the tuning, calls are ordinary; Triton is patched inside a closure and not outside."""
    step, spent, seen = tuned(autotuned(blocks=(16, 32))), list[str](), list[bool]()
    step(torch.zeros(64))
    with pytest.MonkeyPatch.context() as patch:

        def count(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def counted(*args: Any, **kwargs: Any) -> Any:
                if threading.current_thread() is threading.main_thread():  # others still answer peers that come later
                    spent.append(name)
                return original(*args, **kwargs)

            patch.setattr(owner, name, counted)

        for name in ("set", "get", "add", "check", "wait", "compare_set", "multi_get"):
            count(dist.PrefixStore, name)
        count(dist, "all_reduce")
        count(tuning, "Story")
        for _ in range(3):
            step(torch.zeros(64))
    tuned(None, lambda: seen.append(is_unpatched()))()
    assert (spent, seen[0], is_unpatched()) == ([], False, True)


@on_each_rank()
def test_a_closure_without_autotuned_kernels_runs_once_and_says_so(rank: int):
    """It returns its value, and the log has one debug line about it."""
    runs: list[int] = []
    step = tuned(None, lambda: runs.append(1) or len(runs))  # type: ignore[func-returns-value]
    assert ([step(), step()], len(step.records)) == ([1, 2], 0)
    (line,) = [line for line in log().splitlines() if "nothing to tune" in line]
    assert "DEBUG" in line


@pytest.mark.once
@on_each_rank()
def test_a_winner_known_to_one_rank_only_strands_nobody(rank: int) -> Any:
    """The site is tuned on both ranks, so both end with the same config; vanilla tuning before does not decide."""
    kernel = autotuned()
    if rank == 1:
        kernel.cache[64, "torch.float32", "torch.float32"] = kernel.configs[0]
    step = tuned(kernel)
    assert (step(torch.zeros(64))[0].item(), len(step.records)) == (1.0, 1)
    return best(kernel)


@pytest.mark.once
@on_each_rank()
def test_a_site_met_on_one_rank_only(rank: int) -> Any:
    """The other rank takes part in all replays and brings nothing; the owner gets its winner."""
    common, lonely = autotuned(blocks=(16, 32)), autotuned(blocks=(32, 64, 128))

    def closure(x: torch.Tensor) -> float:
        y = launch(common, x)
        if rank == 1:
            y = launch(lonely, y)
        dist.all_reduce(y)
        return y[0].item()

    step = tuned(None, closure, n_repeat=2)
    assert (step(torch.zeros(64)), len(step.records), len(best(lonely))) == (3.0, 2, rank)
    return best(common)


@pytest.mark.once
@on_each_rank()
def test_sites_met_in_some_replays_only(rank: int) -> Any:
    """A kernel launched in every other replay, and one that first comes up in the fourth, are tuned; the search ends."""
    always, sometimes, late = autotuned(blocks=(16, 32)), autotuned(), autotuned(blocks=(32, 64))
    runs: list[int] = []

    def closure(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = launch(always, x)
        if len(runs) % 2 == 1:
            y = launch(sometimes, y)
        if len(runs) > 3:
            launch(late, y)
        return x

    tuned(None, closure, n_repeat=2, n_warmup=1)(torch.zeros(64))
    winners = [best(kernel) for kernel in (always, sometimes, late)]
    assert [len(each) for each in winners] == [1, 1, 1]
    assert len(runs) < 60
    return winners


@pytest.mark.once
@on_each_rank()
def test_a_site_that_no_replay_meets_again_settles_on_the_first_that_runs(rank: int):
    """Nothing can be measured, so the first candidate stays; the tuning ends after the nominal number of replays."""
    kernel, runs = autotuned(), list[int]()

    def closure(x: torch.Tensor) -> None:
        runs.append(1)
        if len(runs) == 1:
            launch(kernel, x)

    tuned(None, closure, n_repeat=2, n_warmup=1, search="exhaustive")(torch.zeros(64))
    assert (best(kernel), len(runs)) == ([16], 2 + 9 + 1)
