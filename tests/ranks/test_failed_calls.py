"""Calls that fail on one rank, and calls made again: all ranks hear of it or go on together, and later calls are tuned as always."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import PeerFailedError, autotune
from dist_tune.distributed import Ranks
from dist_tune.distributed.meetings import Meetings
from dist_tune.testing import values
from tests.ranks.stuck import left_with, stuck_kernel
from tests.steps import autotuned, best, launch, tuned
from tests.worlds import DEADLINE_S, further, on_ranks


def until_it_works(call: Callable[[], object]) -> list[str]:
    """Make the call again after each error; what the errors said."""
    told = []
    for _ in range(4):
        try:
            call()
            break
        except (ValueError, PeerFailedError) as error:
            told.append(str(error))
    return told


# -- an error in a tuning ----------------------------------------------------------------------------------------------


def _speaks_of_collectives(rank: int) -> None:
    kernel, runs = autotuned(blocks=(16, 32)), []

    def step(x: torch.Tensor) -> None:
        runs.append(1)
        y = launch(kernel, x)
        if rank == 1 and len(runs) == 3:
            raise RuntimeError("block size must be a multiple of the NCCL channel count")
        dist.all_reduce(y)

    tuned(kernel, step)(torch.zeros(64))


def _without_collective(rank: int) -> None:
    kernel, runs = autotuned(blocks=(16, 32)), []

    def step(x: torch.Tensor) -> None:
        runs.append(1)
        launch(kernel, x)
        time.sleep(0.1)
        if rank == 1 and len(runs) == 4:
            raise RuntimeError("mine")

    tuned(kernel, step, n_repeat=50, search="exhaustive")(torch.zeros(64))


def _interrupted(rank: int, n_verdicts: int = 1) -> None:
    read, count = Meetings._read_verdict, [0]

    def interrupt(self: Meetings) -> Any:
        count[0] += 1
        if rank == 1 and count[0] == n_verdicts:
            raise KeyboardInterrupt("between a verdict and its reading")
        return read(self)

    Meetings._read_verdict = interrupt  # type: ignore[method-assign]
    tuned(autotuned())(torch.ones(64))


ERRORS = [
    ((_speaks_of_collectives,), "RuntimeError: block size must be a multiple of the NCCL channel count"),
    ((_without_collective,), "RuntimeError: mine"),
    ((_interrupted, 1), "KeyboardInterrupt: between a verdict and its reading"),
    further((_interrupted, 4), "KeyboardInterrupt: between a verdict and its reading"),
]


@pytest.mark.parametrize(("job", "told"), ERRORS)
def test_an_error_in_a_tuning_is_the_rank_s_own_and_names_it_on_the_others(job: Any, told: str):
    """Also one whose words are those of a broken collective; where no collective tells of it, the others hear before the batch's end."""
    peer, culprit = on_ranks(2, *job)
    assert f"{culprit.error}: {culprit.message}" == told
    assert peer.error == "PeerFailedError", f"{peer.error}: {peer.message}"
    assert f"rank 1 raised {told}" in peer.message
    assert peer.seconds < 3


def _interrupted_after_a_failure(rank: int) -> None:
    runs: list[int] = []

    @autotune([{"block": 16}, {"block": 32}], None, n_warmup=1, n_repeat=2)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        dist.all_reduce(x + 1)
        runs.append(block)
        if len(runs) == 1:
            raise ValueError("after the collective of the first run")
        raise KeyboardInterrupt

    step(torch.zeros(4))


def test_an_interrupt_after_a_first_run_that_failed_is_raised_as_it_is():
    """Not the error of that run in its place."""
    (only,) = on_ranks(1, _interrupted_after_a_failure)
    assert only.error == "KeyboardInterrupt", f"{only.error}: {only.message}\n{only.notes}"


def _slow_store(rank: int) -> int:
    own = Ranks.beat

    def beat(self: Ranks, *args: Any, **options: Any) -> None:
        time.sleep(0.2)
        own(self, *args, **options)

    Ranks.beat = beat  # type: ignore[method-assign,assignment]
    step = tuned(autotuned(blocks=(16, 32, 64, 128)), n_repeat=2, search="exhaustive", cache=False)
    step(torch.ones(64))
    return int(step.records[0].n_replays)


def test_a_slow_store_costs_no_meeting_for_every_replay():
    """Its answers between replays are no time of theirs."""
    outcomes = on_ranks(2, _slow_store, timeout_s=60)
    for n_replays, outcome in zip(values(outcomes), outcomes, strict=True):
        assert outcome.log.count("meeting='report'") < n_replays / 2, outcome.log


# -- ranks that end or are late in their first call --------------------------------------------------------------------


def _leaves(rank: int, face: str, where: str) -> None:
    kernel = autotuned()

    def work(x: torch.Tensor, block: int = 0) -> torch.Tensor:
        if (rank, where) == (1, "before the collective"):
            os._exit(3)
        y = launch(kernel, x) if face == "contextual" else x + 1
        dist.all_reduce(y)
        if (rank, where) == (1, "after it"):
            os._exit(3)
        return y

    step = tuned(kernel, work) if face == "contextual" else autotune([{"block": 1}, {"block": 2}], None)(work)
    if (rank, where) == (1, "before the call"):
        time.sleep(0.2)
        os._exit(3)
    step(torch.zeros(64))


LEAVES = [(face, where) for face in ("contextual", "function") for where in ("before the collective", "after it")]


@pytest.mark.parametrize(("face", "where"), [*LEAVES, ("contextual", "before the call")])
def test_a_rank_whose_process_ends_in_its_first_call_is_told_at_once(face: str, where: str):
    """Long before the deadline, as ours: gloo's error is the cause of that, and no part of its text."""
    first, second = on_ranks(2, _leaves, face, where, env={"DIST_TUNE_DEADLINE_S": "20"})
    left_with(second, 3)
    assert first.error == "AbsentRanksError", f"{first.error}: {first.message}\n{first.notes}"
    # Its latest answer to rank 0, which may ask before, in and after the meeting that comes before the first run of a function.
    doing = "its first run" if face == "contextual" else "(its first run|the exchange 'manifest'|replay 0, .*)"
    seen = "nothing yet" if where == "before the call" else rf"{doing} of .*, call 1 for \d+\.\d s, its process has ended"
    assert re.match(rf"rank 1 last seen at: {seen}\. So ranks \[1\] did not come ", first.message), first.message
    assert ("/gloo/" in first.message, "/gloo/" in first.notes) == (False, where != "after it")
    assert first.seconds < 4  # on a busy machine


def _too_slow(rank: int, slow: int) -> None:
    @autotune([{"block": block} for block in (1, 2, 4)], None, n_warmup=0, n_repeat=1)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        time.sleep(1.25 * DEADLINE_S if (rank, block) == (1, slow) else 0.0)
        y = x + 1
        dist.all_reduce(y)
        return y

    step(torch.zeros(64))


@pytest.mark.parametrize("slow", [1, 2])
def test_a_config_that_comes_too_late_for_a_collective_is_named_with_its_rank(slow: int):
    """On both ranks, also where it is the one of the first run, replay 0; with what to do, and without gloo's text."""
    for outcome in on_ranks(2, _too_slow, slow):
        assert outcome.error == "PeerFailedError", f"{outcome.error}: {outcome.message}\n{outcome.notes}"
        run = "0" if slow == 1 else "[1-9]"
        told = rf'rank 1 was late: replay {run}, .* candidate {slow - 1} "block={slow}" .*; so rank 0 waited in vain in a collective of .*'
        told += r"\. Leave out a config that "
        assert re.match(told, outcome.message), outcome.message
        assert ("/gloo/" in outcome.message, "/gloo/" in outcome.notes) == (False, True)


def _too_slow_at_first(rank: int) -> None:
    kernel, runs = autotuned(), []

    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = launch(kernel, x)
        time.sleep(1.25 * DEADLINE_S if (rank, len(runs)) == (1, 2) else 0.0)
        dist.all_reduce(y)
        return y

    tuned(None, step)(torch.zeros(64))


def test_a_first_config_that_comes_too_late_for_a_collective_is_named_with_its_rank():
    """Of a step, whose first run has the group's own timeout: in its second run the group breaks, and no call could go on with it."""
    for outcome in on_ranks(2, _too_slow_at_first):
        assert outcome.error == "PeerFailedError", f"{outcome.error}: {outcome.message}"
        assert re.match(
            r"rank 1 was late: the second run of .*, .*kernel\[.* candidate \d \"BLOCK=.*\. Leave out a config that ", outcome.message
        )
        assert "/gloo/" not in outcome.message


# -- calls made again --------------------------------------------------------------------------------------------------


def _matched(rank: int) -> Any:
    kernel, runs, found = autotuned(), [], []

    def step(x: torch.Tensor, talks: bool) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) == 1:
            raise ValueError("before the collective")
        y = launch(kernel, x)
        if talks:
            dist.all_reduce(y)
        return y

    call = tuned(kernel, step)
    for n, talks in ((64, True), (128, False), (256, True), (64, True)):
        told = until_it_works(lambda: call(torch.ones(n), talks))  # noqa: B023  # called within this round
        found.append((told, len(call.records)))
    return found, best(kernel)


def test_a_call_made_again_frees_the_rank_that_waits_in_its_collective():
    """That call is not tuned, nor the next one, which has no collective; later calls are, where collectives show the call."""
    (first, first_best), (second, second_best) = values(on_ranks(2, _matched))
    assert first == [([], 0), ([], 0), ([], 1), ([], 2)]
    assert second == [(["before the collective"], 0), *first[1:]]
    assert first_best == second_best
    assert len(first_best) == 2


def _recalled(rank: int) -> Any:
    kernel = autotuned()

    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * n
        if "WITH_KERNEL" in os.environ:
            y = launch(kernel, x)
            dist.all_reduce(y)
            if rank == 1 and os.environ.pop("SLOW", ""):
                time.sleep(0.5)
        return y

    def decorated() -> Any:
        return autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x.numel(), n_warmup=0, n_repeat=1)(function)

    dist.barrier()  # a collective before the call, so that collectives are compared
    decorated()(torch.ones(64))
    os.environ.update({"WITH_KERNEL": "1", "SLOW": "1"})
    again = decorated()
    again(torch.ones(64))
    return [each.is_recalled for each in again.records], best(kernel)


def test_a_rank_that_is_slow_after_a_collective_of_a_recalled_function_is_waited_for():
    """It has not gone on: it has issued what the others have, and kernels inside the function are tuned."""
    first, second = values(on_ranks(2, _recalled))
    assert first == second
    assert first[0] == [False, True]
    assert len(first[1]) == 1


def _hangs(rank: int) -> Any:
    """Rank 1 fails twice before it has issued a collective, and then hangs there; rank 0 waits in its first call meanwhile."""
    kernel, stuck, runs = autotuned(), stuck_kernel("sleep", 0, 1 if rank == 1 else 0), []

    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) <= 2:
            raise ValueError("once")
        y = launch(stuck, launch(kernel, x))
        dist.all_reduce(y)
        return y

    call = tuned(kernel, step)
    for _ in range(2 * rank):
        with suppress(ValueError):
            call(torch.ones(64))
    call(torch.ones(64))


def test_a_config_that_hangs_in_a_call_made_again_is_named():
    """The errors of the calls before it are not the cause."""
    first, second = on_ranks(2, _hangs, timeout_s=25)
    left_with(second, 86)
    assert first.error == "StuckConfigError", f"{first.error}: {first.message}\n{first.notes}"
    assert all(word in first.message for word in ("rank 1", "candidate 0", "BLOCK=16", "discovery")), first.message
    assert first.seconds < 2 * DEADLINE_S + 3  # on a busy machine


# -- calls with nothing to tune ----------------------------------------------------------------------------------------


def _raises(rank: int, face: str, how: str) -> Any:
    """Rank 1 raises in a call that is known, and goes on in one of these ways; records of two functions after later calls."""
    n_failures, steps = [0], list[Any]()
    for number in range(2):
        kernel = autotuned()

        def step(x: torch.Tensor, config: int = 0, number: int = number, kernel: Any = kernel) -> torch.Tensor:
            if number == 0 and n_failures[0]:
                n_failures[0] -= 1
                raise ValueError("once")
            return launch(kernel, x) if face == "contextual" else x + config

        step.__qualname__ += str(number)
        space = [{"config": 1}, {"config": 2}]
        steps.append(tuned(kernel, step) if face == "contextual" else autotune(space, lambda x, **_: len(x), n_warmup=0, n_repeat=1)(step))

    def run(*sizes: int) -> list[list[int]]:
        return [[step(torch.ones(n)) is not None and len(step.records) for step in steps] for n in sizes]

    run(64)
    n_failures[0] = {"thrice": 3}.get(how, 1) * (rank == 1)
    if how == "passes":
        for _ in range(2):
            with suppress(ValueError):
                steps[0](torch.ones(64))
            dist.all_reduce(torch.ones(1))
        return run(128)
    if rank == 1 and how == "in parts":
        with pytest.raises(ValueError, match="once"):
            steps[0](torch.ones(64))
        steps[0](torch.ones(64))
        steps[0](torch.ones(64))
    else:
        until_it_works(lambda: run(64))
    return run(128, 256)


@pytest.mark.parametrize("face", ["contextual", "function"])
@pytest.mark.parametrize("how", [further("thrice"), "in parts", "passes"])
def test_a_call_that_raised_on_one_rank_ends_in_no_error(how: str, face: str):
    """Without collectives nothing says which calls belong together: ranks go on alone, each with a config that it has.

    Where a collective follows, what the ranks call after it is one call, and tuned.
    """
    outcomes = on_ranks(2, _raises, face, how)
    found = values(outcomes)
    assert how != "passes" or found == [[[2, 2]]] * 2
    assert how != "in parts" or all(" is alone in " in each.log for each in outcomes)


def _falls_back(rank: int, where: tuple[int, ...]) -> Any:
    def hook(args: Any) -> None:
        if rank in where:
            raise triton.OutOfResources(300_000, 232_448, "shared memory")

    kernel = autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32)])
    fallbacks: list[int] = []

    def step(x: torch.Tensor) -> float:
        try:
            y = launch(kernel, x)
        except triton.OutOfResources:
            y = x + 1
            fallbacks.append(1)
        dist.all_reduce(y)
        return float(y[0])

    call = tuned(kernel, step)
    got = [call(torch.zeros(64))]
    n_first = len(fallbacks)
    got += [call(torch.zeros(64)), call(torch.zeros(128))]
    return got, n_first > 0, len(fallbacks) - n_first > 1, len(call.records)


@pytest.mark.parametrize(("where", "n_records"), [((1,), 2), ((0, 1), 0)])
def test_a_fallback_of_the_step_is_its_own_affair(where: tuple[int, ...], n_records: int):
    """Rank 1 falls back in every run and call, and rank 0 tunes the kernel for itself; where no config runs anywhere, nothing is tuned."""
    for rank, got in enumerate(values(on_ranks(2, _falls_back, where))):
        assert got == ([2.0, 2.0, 2.0], rank in where, rank in where, n_records)
