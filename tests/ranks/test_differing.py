"""Ranks whose calls, sites or candidates differ: what is tuned then, and that no rank waits for one
that will not come.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import autotune, tune_all
from dist_tune.testing import ExactTime
from tests.steps import (
    FACES,
    Face,
    Step,
    accumulate_kernel,
    all_reduced,
    autotuned,
    best,
    configs,
    launch,
    tuned,
)
from tests.worlds import further, is_interpreted, log, on_each_rank, on_ranks

LONG_S = "300"
"""A deadline: the ranks of a world are given up before."""


# -- calls -----------------------------------------------------------------------------------------


def drawn(seed: str, sign: int = 1) -> list[int]:
    """12 lengths; negative ones are those of calls without a collective."""
    draw = random.Random(seed)
    return [sign * draw.choice((64, 96, 128, 160)) for _ in range(12)]


CALLS: dict[str, tuple[list[int], list[int], int]] = {
    "the same lengths": (drawn("both"), drawn("both"), 4),
    "other lengths": (drawn("0"), drawn("1"), 0),
    "new on rank 1 alone, then on both": ([64, 64, 64, 128], [64, 128, 64, 128], 2),
    "rank 0 is ahead, new on both": ([64, -64, -64, 128, 64], [64, 128, 64], 2),
    "rank 0 is ahead, new on it": ([64, -64, -64, 128, 64, 64], [64, 64, 64, 64], 1),
    "rank 0 is ahead, new on rank 1": ([64, -64, -64, 64, 64, 64], [64, 128, 64, 64], 1),
    "rank 0 is ahead, new on one after the other": (
        [64, -64, -64, 128, 96, 64, 128],
        [64, 64, 128, 96, 128],
        0,
    ),
    "no collectives, new on rank 1": ([-64, -64], [-64, -128], 1),
    "no collectives, more calls on rank 1": ([-64, -64], [-64, -65, -66, -67], 1),
}
"""The lengths of the calls of each rank, and how many tunings come of them; 0: it depends on who is
first.
"""


@on_each_rank(
    cases=[
        *((face, name) for face in FACES for name in CALLS),
        *(further((face, "no collectives")) for face in FACES),
    ]
)
def test_ranks_may_make_other_calls(rank: int, case: tuple[Face, str]):
    """Each step's sum is its own.

    What is new on one rank runs with a known config and is tuned when all have it; no rank waits in
    vain.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = LONG_S
    *of_each, n_tuned = CALLS.get(case[1]) or (drawn("0", -1), drawn("1", -1), 0)
    together, is_shared = [[n for n in each if n > 0] for each in of_each], [True]

    def rest(y: torch.Tensor) -> float:
        return float(all_reduced(y.sum()) if is_shared[0] else y.sum())

    step, sums = (
        Step(case[0], (16, 32), rest=rest, name=f"calls {case}"),
        map(sum, zip(*together, strict=True)),
    )
    for n in of_each[rank]:
        is_shared[0] = n > 0
        assert step(torch.zeros(abs(n))) == (next(sums) if n > 0 else -n)
    # A function meets before its first run has issued a collective: ranks that count otherwise are
    # in other calls there.
    assert (
        len(step.records) == n_tuned
        or not n_tuned
        or (case[0] == "function" and "ahead" in case[1])
    )


@on_each_rank()
def test_new_shapes_without_a_miss_cost_a_rank_no_wait(rank: int):
    """Also where the other rank calls less often; what misses on both is tuned, though one rank has
    heard that call from its beginning.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = LONG_S
    kernel, n = autotuned(blocks=(16, 32)), [64]

    def new_shapes(x: torch.Tensor) -> float:
        return float(all_reduced(launch(kernel, torch.zeros(n[0])))[0])

    step = tuned(None, new_shapes)
    for m in (1, 1 + rank, 1 + 2 * rank):
        assert step(torch.zeros(m)) == 2.0
    n[0] = 128
    assert step(torch.zeros(4 + rank)) == 2.0
    assert len(step.records) == 2
    return best(kernel)


@on_each_rank(cases=FACES)
def test_ranks_in_different_steps_go_on_untuned(rank: int, face: Face):
    """Each waits for the other: no error, and the line names both."""
    step = Step(face, name=f"{face} {['one', 'other'][rank]}")
    assert step(torch.zeros(64))[0] == 1.0
    assert re.search(
        r"rank 0 waits in \S* one, call 1 and rank 1 waits in \S* other, call 1", log()
    )


@on_each_rank()
def test_a_call_that_one_rank_makes_of_a_list_is_not_tuned(rank: int):
    """The other is in a collective of the program: one line says so."""
    step, sizes = Step("contextual", name="of a list"), (64, 128, 256)[: 3 - rank]
    found = tune_all(step.call, map(torch.zeros, sizes))
    dist.all_reduce(torch.zeros(1))
    assert (len(found), rank == 1 or "ranks [1] have passed it" in log()) == (2, True)


@on_each_rank(3)
def test_a_pipeline_over_gloo_strands_no_rank(rank: int):
    """Gloo counts what two ranks send each other, too: after their first call ranks count
    differently, and go on alone.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = LONG_S
    kernel = autotuned(blocks=(16, 32))

    def exchange(x: torch.Tensor) -> torch.Tensor:
        if rank > 0:
            dist.recv(x, rank - 1)
        y = launch(kernel, x)
        if rank < 2:
            dist.send(y, rank + 1)
        return y

    step = tuned(kernel, exchange)
    assert [step(torch.zeros(n))[0] for n in (64, 128, 64, 128)] == [rank + 1.0] * 4
    assert step.records


def _exits(rank: int) -> None:
    kernel = autotuned(blocks=(16, 32))
    tuned(kernel, lambda x: os._exit(3) if rank == 1 else launch(kernel, x))(torch.ones(64))


def test_a_process_that_ends_before_the_first_meeting_leaves_the_call_untuned():
    """The step itself says whether it needs that rank; the line says what has become of it."""
    first, _ = on_ranks(2, _exits, env={"DIST_TUNE_DEADLINE_S": LONG_S})
    assert first.error in ("", "AbsentRanksError"), first.message
    assert "its process has ended" in first.log


# -- sites -----------------------------------------------------------------------------------------

MET: dict[str, Callable[[int, int], bool]] = {
    "in every other replay": lambda rank, run: run % 2 == 1,
    "from the fourth run on": lambda rank, run: run > 3,
    "in the first run alone": lambda rank, run: run == 1,
    "on rank 1 alone": lambda rank, run: rank == 1,
    "on rank 0 from the last run on": lambda rank, run: rank == 1 or run > 2 + 3 * 3,
    "on rank 1 in the race alone": lambda rank, run: rank == 0 or run < 9,
}
"""Whether a rank launches a kernel in this run of a step."""


@on_each_rank(cases=[*MET])
def test_a_site_met_in_a_part_of_the_runs_gets_one_winner(rank: int, case: str) -> Any:
    """A rank that does not meet it takes part in all replays; what was measured decides, and the
    first that ran if nothing was.
    """
    always, some, runs = (
        autotuned(blocks=(16, 32)),
        autotuned(accumulate_kernel, blocks=(16, 32, 64)),
        [0],
    )

    def met_in_part(x: torch.Tensor) -> float:
        runs[0] += 1
        y = launch(always, x)
        if MET[case](rank, runs[0]):
            launch(some, x, y)
        return float(all_reduced(y)[0])

    step = tuned(
        None,
        met_in_part,
        n_repeat=2,
        n_warmup=1,
        search="exhaustive" if "first" in case or "last" in case else None,
    )
    step(torch.zeros(64))
    assert (len(step.records), best(always), runs[0] < 60) == (2, [32], True)
    assert best(some) == (
        [] if (rank, case) == (0, "on rank 1 alone") else [16 if "first" in case else 64]
    )
    assert runs[0] == 2 + 3 * 3 + 1 or "first" not in case


def alike() -> Any:
    """A kernel with configs that read alike, of which the second is fast, and another one."""
    hooks = [lambda named, ms=ms: ExactTime.pass_ms(ms) for ms in (20.0, 0.0, 20.0)]
    return autotuned(
        configs=[*(triton.Config({"BLOCK": 64}, pre_hook=hook) for hook in hooks), *configs(16)]
    )


@on_each_rank(cases=[[None, 0], [0, 1]])
def test_a_config_known_to_one_rank_only_decides_nothing(rank: int, known: list[int | None]) -> Any:
    """The site is tuned on both ranks, also where configs that ranks know read alike; so all end
    with one.
    """
    kernel, mine = alike(), known[rank]
    if mine is not None:
        kernel.cache[64, "torch.float32", "torch.float32"] = kernel.configs[mine]
    step = tuned(kernel)
    assert (step(torch.zeros(64))[0].item(), len(step.records)) == (1.0, 1)
    return [kernel.configs.index(config) for config in kernel.cache.values()]


# -- candidates ------------------------------------------------------------------------------------


@on_each_rank(modes=("interpret", "fake"))
def test_of_candidate_lists_that_differ_the_common_part_is_tuned(rank: int):
    """In the first rank's order.

    The second call hits; later processes find the record, also those that require one.
    """
    for mode, is_recalled in (("tune", False), ("tune", True), ("require", True)):
        os.environ["DIST_TUNE_MODE"] = mode
        step = Step("contextual", [(16, 32, 64), (128, 64, 32)][rank])
        sums = [float(step(torch.zeros(64))[0]) for _ in range(2)]
        assert sums == [1.0, 1.0] or not is_interpreted()
        (record,) = step.records
        assert [each.config[:8] for each in record.candidates] == ["BLOCK=32", "BLOCK=64"]
        assert (record.is_recalled, step.ran[-1]) == (is_recalled, step.best[0])
    assert (
        log().count(
            "its configs after pruning differ between ranks, and what all ranks have is tuned: 2"
            " configs"
        )
        == 1
    )


@on_each_rank(cases=["overlap", "fewer", "apart"])
def test_a_rank_that_comes_to_a_kernel_later_counts_its_candidates_as_the_others_do(
    rank: int, case: str
):
    """In the midst of a race: what it lacks fails there, and what it has besides does not race.

    With nothing in common it tunes alone.
    """
    first = (16, 32, 64)
    kernel = autotuned(
        configs=configs(
            *(
                first
                if rank == 0
                else {"overlap": (8, 64, 32), "fewer": (32, 8), "apart": (4, 8)}[case]
            )
        )
    )
    always, runs = autotuned(accumulate_kernel, blocks=(16, 32, 64)), [0]

    def step(x: torch.Tensor) -> float:
        runs[0] += 1
        total = launch(always, x, torch.zeros(64)).sum()
        if rank == 0 or runs[0] > 2:
            total = total + launch(kernel, x).sum()
        return float(all_reduced(total))

    assert tuned(always, step, reset=list, cache=False, n_repeat=5)(torch.zeros(64)) == 128.0
    (used,) = best(kernel)
    assert (
        used in {"overlap": (32, 64), "fewer": (32,), "apart": first if rank == 0 else (4, 8)}[case]
    )


@on_each_rank(cases=[(face, reset) for face in FACES for reset in (None, list)])
def test_without_a_common_candidate_the_call_is_not_tuned(rank: int, case: tuple[Face, Any]):
    """One line says why; each rank keeps a config of its own, and no other run follows."""
    step = Step(case[0], [(16, 32), (64, 128)][rank], reset=case[1], name=f"apart {case}")
    assert [float(step(torch.zeros(64))[0]) for _ in range(3)] == [1.0] * 3
    assert (len(step.records), step.ran) == (0, [step.ran[0]] * 3)
    assert re.search(
        r"no config of it is on all ranks \(2, the first .*16.* on rank 0, .*64.* on rank 1\): not"
        r" tuned",
        log(),
    )


# -- kernels of one name and key -------------------------------------------------------------------


def runs_only(block: int, turn: int = 0) -> Any:
    """A kernel of a factory that compiles with one block size alone."""
    block, turn = tl.constexpr(block), tl.constexpr(turn)

    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        tl.static_assert(block == BLOCK)
        tl.store(x_ptr, 1.0 + turn)

    return autotuned(kernel)


def captured(value: int) -> Any:
    """A kernel of a factory that runs with any block size."""
    value = tl.constexpr(value)

    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        tl.store(x_ptr, 1.0 + value)

    return autotuned(kernel)


def stepped(kernels: Callable[[], Iterable[Any]], runs: list[int], **options: Any) -> list[Any]:
    """The records of a step that launches them."""

    def of_one_name() -> None:
        runs.append(1)
        for kernel in kernels():
            kernel[(1,)](torch.zeros(64), 64)

    step = tuned(None, of_one_name, **options)
    step()
    return [*step.records]


@on_each_rank(modes=["fake"])
def test_factory_kernels_have_their_own_winners(rank: int):
    """Sites go by the order of launches, also where records are taken over and where the step makes
    the kernels anew in each replay.
    """
    for is_recalled in (False, True):
        found = [
            (record.best.fields["BLOCK"], record.is_recalled)
            for record in stepped(lambda: map(runs_only, (16, 32, 64), [rank] * 3), [])
        ]
        assert found == [(block, is_recalled) for block in (16, 32, 64)]
    # All that differs is the rank's own number.
    (record,) = stepped(lambda: [runs_only(16, turn=rank)], [], cache=False)
    assert record.winner == 0


OTHERS: dict[str, Callable[[int], list[Any]]] = {
    "value=7 on rank 0, 10 on rank 1": lambda rank: [captured([7, 10][rank])],
    "block=16 on rank 0, 32 on rank 1": lambda rank: [
        runs_only(block) for block in ((16, 32), (32, 16))[rank]
    ],
    "turn=0 on rank 0, 10 on rank 1": lambda rank: [runs_only(16, turn=10 * rank)],
    "code=": lambda rank: [captured(0) if rank else runs_only(16)],
}
"""What ranks cannot take for one kernel: other values, other orders of launches, other code."""


@on_each_rank(modes=["fake"], cases=[*OTHERS])
def test_kernels_that_are_others_on_other_ranks_are_not_mixed(rank: int, case: str):
    """All ranks run the first config that loads on all, and one line tells why; configs that are
    known stay as they are.
    """
    kernels, runs = OTHERS[case](rank), list[int]()
    assert len(stepped(lambda: kernels, [])) == 0
    assert (case in log() or rank, "not tuned" in log()) == (True, True)
    for kernel in kernels:
        kernel.cache.clear()
        stepped([kernel].copy, [], is_dist=False)
    assert (stepped(lambda: kernels, runs), runs) == ([], [1])


@triton.jit
def fill_kernel(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@on_each_rank()
def test_a_kernel_with_a_prune_rule_never_runs_what_the_rule_leaves_out(rank: int):
    """Also where another kernel of its name and key has none: the one whose rule keeps the block
    that fills all has it for the result.
    """
    rule = {
        "early_config_prune": lambda configs, named, **kwargs: [
            each for each in configs if each.kwargs["BLOCK"] >= named["n"]
        ]
    }
    free, pruned = (
        autotuned(fill_kernel, blocks=(64, 128)),
        autotuned(fill_kernel, blocks=(64, 128), prune_configs_by=rule),
    )

    def closure() -> float:
        x, y = torch.zeros(128), torch.zeros(128)
        for kernel, each in [(free, x), (pruned, y)]:
            kernel[(1,)](each, 100)
        return y.sum().item()

    assert (tuned(None, closure)(), best(pruned)) == (128.0, [128])


@on_each_rank()
def test_functions_of_one_factory_are_sites_of_their_own(rank: int):
    """As kernels are."""

    def made(good: int) -> Any:
        def work(x: torch.Tensor, *, block: int) -> torch.Tensor:
            if block != good:
                raise ValueError("another block")
            return x + good

        return autotune([{"block": block} for block in (16, 32)], None, n_warmup=0, n_repeat=1)(
            work
        )

    functions = [made(16), made(32)]
    step = tuned(None, lambda x: [each(x)[0].item() for each in functions])
    assert (step(torch.zeros(4)), step(torch.zeros(4)), len(step.records)) == (
        [16.0, 32.0],
        [16.0, 32.0],
        2,
    )


@on_each_rank()
def test_a_winner_among_configs_that_read_alike_is_that_config(rank: int):
    """In the record, in ``kernel.cache`` and on all ranks; a file has texts alone, of which equal
    ones are numbered.
    """
    for is_recalled in (False, True):
        kernel = alike()
        step = tuned(kernel, n_repeat=3)
        step(torch.zeros(64))
        (record,) = step.records
        assert (record.is_recalled, record.winner, [*kernel.cache.values()]) == (
            is_recalled,
            1,
            [kernel.configs[1]],
        )
        assert len({each.config for each in record.candidates}) == 4
