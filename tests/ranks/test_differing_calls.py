"""Ranks whose calls differ: other lengths, closures and candidates on each rank, calls new on one rank alone, sends between two of them."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.testing import values
from tests.steps import accumulate_kernel, autotuned, best, configs, is_unpatched, launch, tuned
from tests.worlds import DEADLINE_S, further, is_interpreted, log, on_each_rank, on_ranks

LENGTHS = (64, 96, 128, 160, 192, 224)


def summing(kernel: Any, has_collective: bool = True) -> Callable[..., float]:
    """A step that adds one to each element, and adds them up, over ranks if there is a collective."""

    def step(x: torch.Tensor, is_shared: bool = has_collective) -> float:
        y = launch(kernel, x).sum()
        if is_shared:
            dist.all_reduce(y)
        return float(y)

    call: Callable[..., float] = tuned(kernel, step)
    return call


@on_each_rank()
def test_a_site_met_alone_is_tuned_when_all_ranks_are_there(rank: int):
    """It runs a known config until then, and is no error; the first call in which all ranks miss it tunes."""
    kernel = autotuned(blocks=(16, 32))
    step: Any = summing(kernel)
    step(torch.zeros(64))
    step(torch.zeros(64 if rank == 0 else 128))  # new on rank 1 alone
    assert len(kernel.cache) == 1
    for n in (64, 128):
        step(torch.zeros(n))
    assert (len(kernel.cache), len(step.records)) == (2, 2)


def _variable_lengths(rank: int, kind: str, face: str) -> Any:
    kernel = autotuned(blocks=(16, 32), key=("n",) if kind != "bucket" else ())
    step = summing(kernel, kind != "alone")
    if face == "function":

        @autotune([{"block": 1}, {"block": 2}], key_fn=lambda x: x.numel(), n_warmup=0, n_repeat=1)
        def step(x: torch.Tensor, block: int) -> float:
            y = x.sum() + x.numel()
            if kind != "alone":
                dist.all_reduce(y)
            return float(y)

    drawn = random.Random(f"{kind} {'both' if kind == 'same' else rank}").choice
    lengths = [drawn(LENGTHS) for _ in range(50)]
    began = time.monotonic()
    got = [step(torch.full((n,), float(rank))) for n in lengths]
    return lengths, got, time.monotonic() - began


@pytest.mark.parametrize("kind", ["same", "other", further("bucket"), further("alone")])
@pytest.mark.parametrize("face", ["contextual", "function"])
def test_fifty_steps_of_variable_lengths(kind: str, face: str):
    """Same or other keys on the ranks, with a collective or without one: each step's sum is its own, and no rank waits for a deadline."""
    results = values(on_ranks(2, _variable_lengths, kind, face, env={"DIST_TUNE_DEADLINE_S": "20"}))
    each = [[n * (rank + 1.0) for n in lengths] for rank, (lengths, _, _) in enumerate(results)]
    both = [a + b for a, b in zip(*each, strict=True)]
    for rank, (_, got, seconds) in enumerate(results):
        assert got == (each[rank] if kind == "alone" else both)
        assert seconds < 15


def _counts(rank: int, news: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Rank 0 makes two calls more, without a collective; ``news``: lengths of each rank from then on."""
    kernel = autotuned(blocks=(16, 32))
    step = summing(kernel)
    step(torch.zeros(64), True)
    for _ in range(2 if rank == 0 else 0):
        step(torch.zeros(64), False)
    began = time.monotonic()
    got = [step(torch.zeros(n), True) for n in news[rank]]
    seconds = time.monotonic() - began
    dist.barrier()  # a rank that ends without its interpreter's end does not answer the other
    return got, len(kernel.cache), seconds


@pytest.mark.parametrize(
    ("news", "n_known"),
    [
        (((128, 64), (128, 64)), 2),  # new on both: tuned
        (((128, 64, 64), (64, 64, 64)), 1),  # on the rank that is ahead in its count
        (((64, 64, 64), (128, 64, 64)), 1),  # on the other
        (((128, 96, 64, 128), (64, 128, 96, 128)), 2),
    ],
)
def test_counts_that_differ_strand_no_rank(news: Any, n_known: int):
    """No rank waits for a deadline, and what is new on all at once is tuned."""
    both = [float(a + b) for a, b in zip(*news, strict=True)]
    for got, n, seconds in values(on_ranks(2, _counts, news, env={"DIST_TUNE_DEADLINE_S": "10"})):
        assert got == both
        assert n >= n_known
        assert seconds < 8


def _alone(rank: int, kind: str) -> Any:
    """Rank 1 alone misses, has new shapes without a miss, or makes more calls."""
    kernel = autotuned(blocks=(16, 32), key=() if kind == "shapes" else ("n",))
    step = tuned(kernel)
    sizes = {"misses": (64, 128), "shapes": (64, 65, 66), "calls": (64, 65, 66, 67), "leaves": (64, 128)}[kind]
    own = sizes if rank == 1 else [64] * (2 if kind == "calls" else len(sizes))
    seconds = []
    for n in own:
        began = time.monotonic()
        assert step(torch.zeros(n))[0] == 1.0
        seconds.append(time.monotonic() - began)
    if kind != "leaves":
        dist.barrier()
    if kind == "shapes":
        kernel.cache.clear()
        step(torch.zeros(128))
    return max(seconds[1:]), len(step.records), is_unpatched()


@pytest.mark.parametrize("kind", ["misses", "shapes", "calls", "leaves"])
def test_a_rank_that_calls_alone_goes_on_alone(kind: str):
    """The other makes an ordinary call and does not know. It learns that at once, or after the deadline if the other is gone."""
    for seconds, n_records, unpatched in values(on_ranks(2, _alone, kind)):
        assert seconds < (DEADLINE_S / 2 if kind != "leaves" else 3 * DEADLINE_S)
        assert (n_records if kind != "calls" else 1, unpatched) == (1 + (kind == "shapes"), True)


@on_each_rank()
def test_a_call_that_is_new_on_one_rank_and_misses_on_both(rank: int):
    """One rank hears the call from its beginning and the other from the miss on: they replay the same number of times."""
    kernel, n = autotuned(blocks=(16, 32)), [64]

    def closure(x: torch.Tensor) -> float:
        y = launch(kernel, torch.zeros(n[0]))
        dist.all_reduce(y)
        return float(y[0])

    step = tuned(kernel, closure)
    step(torch.zeros(1))
    n[0] = 128
    assert step(torch.zeros(1 + rank)) == 2.0
    return best(kernel)


@on_each_rank()
def test_ranks_in_different_closures_go_on_untuned(rank: int):
    """Each waits for the other: no error, and the line names both closures."""
    kernel = autotuned(blocks=(16, 32))

    def one(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x)

    def other(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x)

    assert tuned(kernel, [one, other][rank])(torch.zeros(64))[0] == 1.0
    assert re.search(r"rank 0 waits in \S*one, call 1 and rank 1 waits in \S*other, call 1", log())


@on_each_rank(modes=("interpret", "fake"))
def test_of_candidate_lists_that_differ_the_common_part_is_tuned(rank: int):
    """In the first rank's order; the second call hits; a later process finds the record, as does another kernel of these lists."""
    for is_recalled in (False, True):
        kernel = autotuned(configs=configs(*[(16, 32, 64), (128, 64, 32)][rank]))
        step = tuned(kernel)
        sums = [float(step(torch.zeros(64))[0]) for _ in range(2)]
        assert sums == [1.0, 1.0] or not is_interpreted()
        (record,) = step.records
        assert [each.config[:8] for each in record.candidates] == ["BLOCK=32", "BLOCK=64"]
        assert (record.is_recalled, best(kernel)) == (is_recalled, [int(record.best.config[6:8])])
    assert log().count("add_kernel [64]: its configs after pruning differ between ranks, and what all ranks have is tuned: 2 configs") == 1


@on_each_rank()
def test_a_record_of_shared_candidates_is_one_that_require_takes(rank: int):
    """Ranks look for it when they know which candidates all of them have."""
    for mode in ("tune", "require"):
        os.environ["DIST_TUNE_MODE"] = mode
        kernel = autotuned(configs=configs(*[(16, 32, 64), (128, 64, 32)][rank]))
        step = tuned(kernel)
        assert float(step(torch.zeros(64))[0]) == 1.0
        assert [each.is_recalled for each in step.records] == [mode == "require"]


@on_each_rank(cases=["overlap", "fewer", "apart"])
def test_a_rank_that_comes_to_a_kernel_later_counts_its_candidates_as_the_others_do(rank: int, case: str):
    """In the midst of a race: what it lacks fails there, and what it has besides does not race. With nothing in common it tunes alone."""
    first = (16, 32, 64)
    kernel = autotuned(configs=configs(*(first if rank == 0 else {"overlap": (8, 64, 32), "fewer": (32, 8), "apart": (4, 8)}[case])))
    always, runs = autotuned(accumulate_kernel, blocks=(16, 32, 64)), [0]

    def step(x: torch.Tensor) -> float:
        runs[0] += 1
        total = launch(always, x, torch.zeros(64)).sum()
        if rank == 0 or runs[0] > 2:
            total = total + launch(kernel, x).sum()
        dist.all_reduce(total)
        return float(total)

    assert tuned(always, step, reset=list, cache=False, n_repeat=5)(torch.zeros(64)) == 128.0
    (used,) = best(kernel)
    assert used in {"overlap": (32, 64), "fewer": (32,), "apart": first if rank == 0 else (4, 8)}[case]


@on_each_rank(cases=[False, True])
def test_without_a_common_candidate_the_call_is_not_tuned(rank: int, may_repeat: bool):
    """One line says why; each rank keeps a config of its own, and no other run follows."""
    kernel, runs = autotuned(configs=configs(16, 32, num_warps=4 + 4 * rank)), list[int]()

    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return launch(kernel, x)

    tuned_step = tuned(kernel, step, **({"reset": list} if may_repeat else {}))
    assert [float(tuned_step(torch.zeros(64))[0]) for _ in range(3)] == [1.0] * 3
    assert (tuned_step.records, sum(runs)) == ([], 3)
    assert re.search(
        r"no config of it is on all ranks \(2, the first .*num_warps=4.* on rank 0, .*num_warps=8.* on rank 1\): not tuned", log()
    )


def _sends(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def exchange(x: torch.Tensor) -> torch.Tensor:
        if rank > 0:
            dist.recv(x, rank - 1)
        y = launch(kernel, x)
        if rank < 2:
            dist.send(y, rank + 1)
        return y

    step = tuned(kernel, exchange)
    began = time.monotonic()
    for n in (64, 128, 256, 64, 128, 256):
        step(torch.zeros(n))
    seconds = time.monotonic() - began
    dist.barrier()
    return len(step.records) >= 1, seconds < DEADLINE_S


def test_a_pipeline_over_gloo_strands_no_rank():
    """Gloo counts what two ranks send each other, too: after their first call ranks count differently, and go on alone."""
    assert values(on_ranks(3, _sends, timeout_s=60)) == [(True, True)] * 3


def _exits(rank: int) -> None:
    kernel = autotuned(blocks=(16, 32))
    tuned(kernel, lambda x: os._exit(3) if rank == 1 else launch(kernel, x))(torch.ones(64))


def test_a_process_that_ends_before_the_first_meeting_leaves_the_call_untuned():
    """The step itself says whether it needs that rank; the line says what has become of it."""
    first, _ = on_ranks(2, _exits, env={"DIST_TUNE_DEADLINE_S": "20"}, timeout_s=60)
    assert first.error in ("", "AbsentRanksError"), first.message
    assert "its process has ended" in first.log
    assert first.seconds < 10
