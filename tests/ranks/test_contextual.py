"""What a tuned closure does on real ranks when nothing goes wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, is_unpatched, launch
from tests.ranks.worlds import on_ranks

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _two_kernels(rank: int) -> Any:
    first, second = autotuned(), autotuned(blocks=(32, 64))
    runs = []

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1, search="exhaustive")
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = launch(first, x)
        dist.all_reduce(y)
        return launch(second, y)

    x = torch.full((64,), float(rank))
    y = step(x)
    tuned = len(runs)
    z = step(x)
    return best(first), best(second), y[0].item(), z[0].item(), tuned, len(runs) - tuned, len(step.records)


def test_several_kernels_in_one_closure():
    """Both kernels are tuned in the same replays, all ranks agree, and the returned value is that of one clean run."""
    got = values(on_ranks(2, _two_kernels))
    assert got[0] == got[1]
    first, second, y, z, tuned, later, n_records = got[0]
    assert len(first) == len(second) == 1
    assert y == z == (1 + 2) + 1
    assert tuned == 2 + 3 * 3 + 1
    assert later == 1
    assert n_records == 2


def _two_keys(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    outputs: list[list[torch.Tensor]] = []

    @contextual_autotune(is_dist=True, **QUICK)
    def step() -> list[torch.Tensor]:
        fresh = [launch(kernel, torch.zeros(n)) for n in (64, 128)]
        outputs.append(fresh)
        return fresh

    last = step()
    written = [[bool((y == 1).all()) for y in replay] for replay in outputs]
    return len(kernel.cache), written, [y.numel() for y in last], best(kernel)


def test_one_kernel_at_two_keys_with_fresh_tensors_in_every_replay():
    """Each key is a site of its own, and every replay launches with its own arguments: every output is written."""
    got = values(on_ranks(2, _two_keys))
    assert got[0] == got[1]
    n_keys, written, sizes, _ = got[0]
    assert n_keys == 2
    assert sizes == [64, 128]
    assert len(written) == 2 + 2 + 1
    assert all(all(replay) for replay in written)


def _steady(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: launch(kernel, x))
    step(torch.zeros(64))
    calls = {"store": 0, "collective": 0, "log": 0}
    from dist_tune.tuning import tuning

    def count(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[kind] += threading.current_thread() is threading.main_thread()  # others still answer peers that come later
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    for name in ("set", "get", "add", "check", "wait", "compare_set", "multi_get"):
        count(dist.PrefixStore, name, "store")
    count(dist, "all_reduce", "collective")
    count(tuning, "Story", "log")
    seen: list[Any] = []
    spy = contextual_autotune(is_dist=True, **QUICK)(lambda: seen.__iadd__([is_unpatched()]))
    for _ in range(3):
        step(torch.zeros(64))
    spent = dict(calls)
    spy()
    return spent, not seen[0], is_unpatched()


def test_a_steady_call_makes_no_collective_no_store_access_and_no_log_line():
    """After the tuning, calls are ordinary; Triton is patched inside a closure and not outside."""
    for spent, patched_inside, restored in values(on_ranks(2, _steady)):
        assert spent == {"store": 0, "collective": 0, "log": 0}
        assert patched_inside
        assert restored


def _no_kernels(rank: int) -> Any:
    runs = []

    @contextual_autotune(is_dist=True)
    def step() -> int:
        runs.append(1)
        return len(runs)

    return step(), step(), len(runs), len(step.records)


def test_a_closure_without_autotuned_kernels_runs_once_and_says_so():
    """It returns its value, and the log has one debug line about it."""
    outcomes = on_ranks(2, _no_kernels)
    assert values(outcomes) == [(1, 2, 2, 0)] * 2
    for outcome in outcomes:
        assert outcome.log.count("nothing to tune") == 1
        assert "DEBUG" in next(line for line in outcome.log.splitlines() if "nothing to tune" in line)


def _known_to_one(rank: int, config: int) -> Any:
    kernel = autotuned(blocks=(16, 32, 64))
    if rank == 1:
        kernel.cache[(64, "torch.float32", "torch.float32")] = kernel.configs[config]
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: launch(kernel, x))
    y = step(torch.zeros(64))
    return best(kernel), y[0].item()


@pytest.mark.once
def test_a_winner_known_to_one_rank_only_strands_nobody():
    """The site is tuned on both ranks, so both end with the same config; vanilla tuning before does not decide."""
    got = values(on_ranks(2, _known_to_one, 0))
    assert got[0] == got[1]
    assert got[0][1] == 1.0


def _known_differently(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32, 64))
    kernel.cache[(64, "torch.float32", "torch.float32")] = kernel.configs[rank]
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: launch(kernel, x))
    step(torch.zeros(64))
    return best(kernel)


@pytest.mark.once
def test_ranks_that_know_different_winners_tune():
    """Two ranks with different configs for one key end with one config."""
    got = values(on_ranks(2, _known_differently))
    assert got[0] == got[1]


def _some_ranks(rank: int) -> Any:
    common, lonely = autotuned(blocks=(16, 32)), autotuned(blocks=(32, 64, 128))

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(common, x)
        if rank == 1:
            y = launch(lonely, y)
        dist.all_reduce(y)
        return y

    y = step(torch.zeros(64))
    return best(common), best(lonely), y[0].item(), len(step.records)


@pytest.mark.once
def test_a_site_met_on_one_rank_only():
    """The other rank takes part in all replays and brings nothing; the owner gets its winner."""
    got = values(on_ranks(2, _some_ranks))
    assert got[0][0] == got[1][0]
    assert got[0][1] == []
    assert len(got[1][1]) == 1
    assert got[0][2] == got[1][2] == 3.0
    assert got[0][3] == got[1][3] == 2


def _some_replays(rank: int) -> Any:
    always, sometimes, late = autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32, 64)), autotuned(blocks=(32, 64))
    runs = []

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = launch(always, x)
        if len(runs) % 2 == 1:
            y = launch(sometimes, y)
        if len(runs) > 3:
            y = launch(late, y)
        return x

    step(torch.zeros(64))
    return best(always), best(sometimes), best(late), len(runs)


@pytest.mark.once
def test_sites_met_in_some_replays_only():
    """A kernel launched in every other replay, and one that first comes up in the fourth, are tuned; the search ends."""
    got = values(on_ranks(2, _some_replays))
    assert got[0] == got[1]
    assert [len(each) for each in got[0][:3]] == [1, 1, 1]
    assert got[0][3] < 60


def _only_discovery(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32, 64))
    runs = []

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1, search="exhaustive")
    def step(x: torch.Tensor) -> None:
        runs.append(1)
        if len(runs) == 1:
            launch(kernel, x)

    step(torch.zeros(64))
    return best(kernel), len(runs)


@pytest.mark.once
def test_a_site_that_no_replay_meets_again_settles_on_the_first_that_runs():
    """Nothing can be measured, so the first candidate stays; the tuning ends after the nominal number of replays."""
    assert values(on_ranks(2, _only_discovery)) == [([16], 2 + 9 + 1)] * 2
