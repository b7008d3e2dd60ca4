"""Ranks that make the same calls: what they tune in how many runs, that they agree on it, and that
events, log and records say the same.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import (
    NoValidConfigError,
    PeerFailedError,
    autotune,
    contextual_autotune,
    to_hashable,
    tune_all,
)
from dist_tune.search import NOT_TRIED
from dist_tune.search.guided import ConfigSpace
from dist_tune.testing import ExactTime, FakeH200
from tests.steps import (
    FACES,
    Face,
    Step,
    accumulate_kernel,
    all_reduced,
    autotuned,
    best,
    configs,
    is_unpatched,
    launch,
    tuned,
)
from tests.worlds import gathered, log, on_each_rank


@on_each_rank()
def test_several_kernels_in_one_closure(rank: int) -> Any:
    """Both are tuned in the same replays, and ``reset`` is called before each of them.

    The value is that of one clean run.
    """
    first, second, total, runs, resets = (
        autotuned(),
        autotuned(blocks=(32, 64)),
        torch.zeros(64),
        [0],
        [0],
    )

    def reset() -> None:
        resets[0] += 1
        total.zero_()

    def several(x: torch.Tensor) -> float:
        runs[0] += 1
        total.add_(all_reduced(launch(first, x)))
        return launch(second, total)[0].item()

    step, x = (
        tuned(None, several, n_repeat=2, n_warmup=1, search="exhaustive", reset=reset),
        torch.full((64,), float(rank)),
    )
    n_runs = 1 + 3 * 3 + 1
    assert [(step(x), runs[0], resets[0]) for _ in range(2)] == [
        (4.0, n_runs, n_runs - 1),
        (7.0, n_runs + 1, n_runs - 1),
    ]
    assert len(step.records) == len(best(first) + best(second)) == 2
    return best(first), best(second)


@on_each_rank()
def test_one_kernel_at_two_keys_with_fresh_tensors_in_every_replay(rank: int) -> Any:
    """Each key is a site of its own, and every replay launches with its own arguments: every output
    is written.
    """
    kernel, outputs = autotuned(blocks=(16, 32)), list[list[torch.Tensor]]()

    def closure() -> list[torch.Tensor]:
        outputs.append([launch(kernel, torch.zeros(n)) for n in (64, 128)])
        return outputs[-1]

    assert [y.numel() for y in tuned(None, closure)()] == [64, 128]
    assert len(outputs) == 2 + 2 + 1
    assert all(bool((y == 1).all()) for replay in outputs for y in replay)
    return best(kernel)


@on_each_rank(cases=FACES)
def test_a_steady_call_makes_no_collective_no_store_access_and_no_log_line(rank: int, face: Face):
    """After the tuning, calls are ordinary; Triton is patched inside a closure and not outside."""
    step, spent, seen = Step(face), list[str](), list[bool]()
    step(torch.zeros(64))
    with pytest.MonkeyPatch.context() as patch:

        def count(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def counted(*args: Any, **kwargs: Any) -> Any:
                # Others still answer peers that come later.
                if threading.current_thread() is threading.main_thread():
                    spent.append(name)
                return original(*args, **kwargs)

            patch.setattr(owner, name, counted)

        for name in ("set", "get", "add", "check", "wait", "compare_set", "multi_get"):
            count(dist.PrefixStore, name)
        count(dist, "all_reduce")
        before = log()
        for _ in range(3):
            step(torch.zeros(64))
        assert log() == before
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


# -- which config ----------------------------------------------------------------------------------


@on_each_rank(cases=[{}, {"objective": "kernel"}, {"n_repeat": 1, "n_warmup": 0}])
def test_the_closure_decides_unless_the_kernel_is_asked_for(
    rank: int, options: dict[str, Any]
) -> Any:
    """The kernel with the largest block is fastest by far, and its config's hook, which takes the
    host 30 ms, makes the step slowest.
    """
    kernel = autotuned(
        configs=[*configs(64, pre_hook=lambda nargs: ExactTime.pass_ms(30.0)), *configs(8, 16, 4)]
    )
    step = contextual_autotune(is_dist=True, **options)(lambda x: all_reduced(launch(kernel, x)))
    step(torch.zeros(64))
    (record,) = step.records
    is_kernel = options.get("objective") == "kernel"
    assert (record.best.fields["BLOCK"] == 64) == is_kernel
    assert options.get("n_repeat", 5) < 5 or (record.closure_weight > 0.5) != is_kernel
    return record.winner


@on_each_rank()
def test_a_rank_that_stops_meeting_a_site_leaves_it_its_times(rank: int) -> Any:
    """In the finals only one rank meets the kernel: what both have measured in the race decides."""
    kernel, runs = autotuned(blocks=(2, 4, 8, 16, 32, 64, 128, 256)), list[int]()

    @contextual_autotune(is_dist=True)
    def step(x: torch.Tensor) -> None:
        runs.append(1)
        if rank == 0 or len(runs) < 25:
            launch(kernel, x)

    step(torch.zeros(256))
    (record,) = step.records
    assert (record.winner > 3, record.best.latency_ms is not None) == (True, True)
    return record.winner


@on_each_rank()
def test_the_time_of_a_replay_with_a_stand_in_is_of_no_candidate(rank: int):
    """A config fails on one rank after a while; what another kernel's candidates took beside it is
    measured again.
    """

    def failing(nargs: Any) -> None:
        if rank == 1:
            ExactTime.pass_ms(500.0)
            raise RuntimeError("not now")

    first = autotuned(configs=[*configs(16), triton.Config({"BLOCK": 32}, pre_hook=failing)])
    second = autotuned(accumulate_kernel, blocks=(16, 32))
    step = tuned(None, lambda x: launch(second, launch(first, x), torch.zeros_like(x)), n_warmup=1)
    step(torch.zeros(64))
    by_kernel = {record.kernel.rpartition(".")[2]: record.candidates for record in step.records}
    assert "RuntimeError: not now" in str(by_kernel["add_kernel"][1].failure)
    assert all(
        each.closure_ms is not None and each.closure_ms < 100
        for each in by_kernel["accumulate_kernel"]
    )


def timed(face: Face, seconds: Sequence[float], **options: Any) -> SimpleNamespace:
    """Configs that take so long: runs of each, the seconds of their tuning, the winner, and why the
    others are not it. Nothing waits.
    """
    blocks, began, monotonic = (
        [16 << i for i in range(len(seconds))],
        ExactTime.seconds,
        time.monotonic,
    )
    ms = {block: each * 1e3 for block, each in zip(blocks, seconds, strict=True)}
    step = Step(face, ms, **{"cache": False, "n_repeat": 5, "n_warmup": 3, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: monotonic() + ExactTime.seconds)
        assert step(torch.zeros(4))[0].item() == 1.0
    (record,) = step.records
    whys = [each.failure or each.left or "" for each in record.candidates]
    return SimpleNamespace(
        ran=[step.ran.count(block) for block in blocks],
        seconds=ExactTime.seconds - began,
        winner=record.winner,
        whys=whys,
    )


SLOW: list[tuple[Face, list[float], list[int]]] = [
    ("function", [0.8, 0.002, 0.002], [0]),
    ("function", [0.3] * 7 + [0.002], [*range(7)]),
    ("contextual", [0.0, 0.001, 0.5], [2]),
]


@on_each_rank(cases=SLOW)
def test_a_slow_config_runs_twice_at_most(rank: int, case: Any) -> Any:
    """Once untimed, because its first run may compile, and once timed: 500 times slower than the
    best, it has had its chance.

    The config of the first run and of the probe runs twice more, and not in between.
    """
    face, seconds, slow = case
    got = timed(face, seconds)
    assert (got.winner in slow, all(got.whys[i] for i in slow)) == (False, True)
    assert {got.ran[i] - 2 * (i == 0) for i in slow} <= {1, 2}
    return got.ran, got.winner


@on_each_rank()
def test_long_configs_are_tuned_in_a_small_multiple_of_one_run_of_each(rank: int):
    """Of four alike none runs more than seven times, nor does one that is slow on one rank
    alone.
    """
    got = timed("function", [0.6, 0.62, 0.64, 0.9])
    assert (max(got.ran) <= 7, got.ran[3], got.winner) == (True, 2, 0)
    assert got.seconds < 5 * (0.6 + 0.62 + 0.64 + 0.9)
    one_sided = timed("function", [0.01, 0.8 if rank == 1 else 0.01, 0.011])
    assert (one_sided.ran[1] <= 3, one_sided.winner in (0, 2)) == (True, True)


@on_each_rank(cases=FACES)
def test_a_budget_ends_the_search_on_all_ranks(rank: int, face: Face) -> Any:
    """Twelve configs of 0.4 s in 1.5 s: a few have run, the best of these wins, and the record
    names the rest.
    """
    got = timed(face, [0.4, 0.38, *[0.41] * 10], budget_s=1.5)
    assert got.seconds < 1.5 + 5 * 0.42  # the first run and the last, the batch under way
    assert {why for n, why in zip(got.ran, got.whys, strict=True) if n == 0} == {
        "not raced: the budget of 1.5 s was spent"
    }
    assert got.ran.count(0) >= 4
    # A machine that stands still meanwhile has spent the budget before the second config runs.
    assert (
        got.ran[got.winner] > 0,
        got.winner == 1 or face == "contextual" or got.ran[1] == 0,
    ) == (True, True)
    return got.ran, got.winner, got.whys


# -- guided search ---------------------------------------------------------------------------------

SPACE = [
    triton.Config({"BLOCK": block, "PAD": pad, "FLAT": flat}, num_warps=warps)
    for block in (16, 32, 64, 128)
    for pad in (1, 2, 4)
    for flat in (False, True)
    for warps in (2, 4)
]
BEST = {"BLOCK": 128, "PAD": 4, "FLAT": True, "num_warps": 4}
N_AT_MOST = 16 + len(SPACE) * 3 // 8


@triton.jit
def padded_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PAD: tl.constexpr, FLAT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + PAD, mask=at < n)


def launch_ms(src: Any, metadata: Any) -> float:
    """Milliseconds of a launch on the fake device: 4 for the best config, 0.8 more for each step
    away from it; 1 of other kernels.
    """
    constants = {src.fn.arg_names[place]: value for (place,), value in src.constants.items()}
    if "PAD" not in constants:
        return 1.0
    sizes = (constants["BLOCK"], 128), (constants["PAD"], 4), (metadata.num_warps, 4)
    n_steps: int = sum(abs(one.bit_length() - other.bit_length()) for one, other in sizes) + (
        not constants["FLAT"]
    )
    return 4.0 + 0.8 * n_steps


@on_each_rank(modes=("fake",))
def test_ranks_try_the_same_part_of_a_large_space_and_find_the_best(rank: int) -> Any:
    """At most 16 and three eighths are compiled, once on both ranks together; the rest has no time.

    A small site beside it races whole.
    """
    compiled: list[Any] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **facts: compiled.extend(
        [facts] * (not cache_hit)
    )
    FakeH200.launch_ms = staticmethod(launch_ms)
    kernel, small = (
        triton.autotune(configs=SPACE, key=["n"])(padded_kernel),
        autotuned(blocks=(64, 128)),
    )
    x, y = torch.zeros(256), torch.zeros(256)

    @contextual_autotune(is_dist=True, search="guided", n_warmup=1, n_repeat=3)
    def step() -> None:
        kernel[(1,)](x, y, 256)
        launch(small, x)

    step()
    large, other = sorted((record.candidates for record in step.records), key=len, reverse=True)
    config = kernel.best_config.all_kwargs()
    assert {name: config[name] for name in BEST} == BEST
    untried = [each.index for each in large if each.left == NOT_TRIED]
    assert len(SPACE) - len(untried) <= N_AT_MOST
    assert [
        i for i, each in enumerate(SPACE) if kernel.configs_timings[each][0] == float("inf")
    ] == untried
    assert [each.index for each in large if each.shared_bytes is None] == untried
    assert NOT_TRIED not in [each.left for each in other]
    # Both may compile what they launch first.
    assert sum(gathered(len(compiled))) <= N_AT_MOST + 2 + 2
    assert re.search(r" tries \d+ more of \d+ candidates, \d+ are untried", log())
    return untried, config, [each.latency_ms for each in large]


WIDE = [{"depth": depth, "width": width} for depth in range(10) for width in range(8)]
TEXTS = [f"depth={each['depth']} width={each['width']}" for each in WIDE]


def searched(search: Any, running: Sequence[int]) -> tuple[str, int, int]:
    """A function of 80 configs, of which these run: the best, how many have run, how many were not
    tried.
    """
    ran: set[int] = set()

    @autotune(WIDE, None, n_warmup=1, n_repeat=2, search=search, cache=False)
    def step(x: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        ran.add(depth * 8 + width)
        if depth * 8 + width not in running:
            raise RuntimeError("does not run")
        ExactTime.pass_ms(2.0 + abs(depth - 6) + abs(width - 5))
        return x

    step(torch.zeros(4))
    record = step.records[0]
    return record.best.config, len(ran), [each.left for each in record.candidates].count(NOT_TRIED)


@on_each_rank()
def test_a_function_runs_a_part_of_its_configs(rank: int):
    """Of 80, and each with search="racing"; more where the one that runs is tried late.

    With none, the error says so.
    """
    winner, n_ran, n_untried = searched(None, range(80))
    assert (winner, n_ran + n_untried, n_ran <= 46) == ("depth=6 width=5", 80, True)
    assert searched("racing", range(80)) == ("depth=6 width=5", 80, 0)
    last = ConfigSpace(TEXTS).spread(80)[-1]
    winner, n_ran, _ = searched("guided", [last])
    assert (winner, n_ran > 46) == (TEXTS[last], True)
    with pytest.raises(NoValidConfigError, match="none of its 80 configs runs"):
        searched("guided", [])


# -- a list of calls -------------------------------------------------------------------------------

SIZES = (64, 128, 256)


@on_each_rank(cases=FACES)
def test_each_call_of_a_list_is_tuned_and_the_slowest_rank_decides(rank: int, face: Face):
    """Ranks are fast with other blocks and take the one in the middle for all sizes.

    A second list, or a later job, replays nothing.
    """
    ms = {16: (1.0, 90.0)[rank], 32: 40.0, 64: (90.0, 1.0)[rank]}
    step = Step(face, ms)
    found = tune_all(step.call, [(torch.zeros(n),) for n in SIZES])
    assert found == step.records
    assert (step.best, len(step.ran) > 2 * len(SIZES)) == ([32] * 3, True)
    step.ran.clear()
    assert tune_all(step.call, ({"x": torch.zeros(n)} for n in SIZES)) == []
    later = Step(face, ms)
    assert [each.is_recalled for each in tune_all(later.call, map(torch.zeros, SIZES))] == [
        True
    ] * 3
    assert (later.best, later.ran, step.ran) == ([32] * 3,) * 3
    return [each.key for each in found]


@on_each_rank()
def test_a_list_of_calls_in_a_group_of_its_own(rank: int):
    """The other rank makes other calls."""
    scaled = autotune([{"scale": 2.0}, {"scale": 3.0}], to_hashable, n_warmup=0, n_repeat=1)(
        lambda x, scale=0.0: x * scale
    )
    groups = [dist.new_group([0]), dist.new_group([1])]
    sizes = SIZES[: 1 + 2 * rank]
    assert len(tune_all(partial(scaled, autotune_pg=groups[rank]), map(torch.zeros, sizes))) == len(
        sizes
    )
    assert len(tune_all(scaled, map(torch.zeros, SIZES))) == 3  # of the world's


@on_each_rank()
def test_an_error_in_the_middle_of_a_list(rank: int):
    """It is raised with the number of the call, and the rank that meets this one in it is told."""

    def rest(y: torch.Tensor) -> torch.Tensor:
        if rank == 1 and y.numel() == 128:
            raise ValueError("a bug")
        return y

    step = Step("contextual", rest=rest, name="with a bug")
    with pytest.raises(ValueError if rank == 1 else PeerFailedError, match="a bug") as raised:
        tune_all(step.call, map(torch.zeros, SIZES))
    assert "in call 2 of 3 of tune_all" in raised.value.__notes__


class Held(dict[str, Any]):
    """Memory whose life can be watched."""


@on_each_rank()
def test_arguments_and_values_are_free_after_each_call_of_a_list(rank: int):
    """References alone free them, also where the call was tuned."""
    kernel, held, alive = autotuned(), list[Any](), list[int]()

    def made(n: int) -> tuple[Any, ...]:
        alive.append(sum(each() is not None for each in held))
        argument = Held(x=torch.zeros(n))
        held.append(weakref.ref(argument))
        return (argument,)

    def body(given: Held) -> Held:
        value = Held(y=launch(kernel, given["x"]))
        held.append(weakref.ref(value))
        return value

    gc.collect()
    gc.disable()
    assert len(tune_all(tuned(None, body), [partial(made, n) for n in SIZES])) == 3
    alive.append(sum(each() is not None for each in held))
    assert alive == [0] * 4


@on_each_rank()
def test_a_list_of_calls_that_may_not_be_replayed(rank: int):
    """Each call is made once, and the one line of such a step says why."""
    kernel, total = autotuned(), torch.zeros(1)

    def body(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return launch(kernel, x) + total

    tune_all(tuned(None, body), map(torch.zeros, SIZES * 2))
    assert (total.item(), log().count("tuned in the calls to come")) == (6, 1)


@on_each_rank(1, is_dist=False)
def test_progress_of_a_list_of_calls_and_mistakes(rank: int):
    """The first and the last call of many that tune nothing have a line; what is no step or no list
    is told in one.
    """
    step = Step("contextual").call
    tune_all(step, [torch.zeros(64)])
    tune_all(step, [torch.zeros(64)] * 50)
    lines = [line for line in log().splitlines() if ": call " in line]
    assert [line.partition(": call ")[2] for line in lines] == ["1 of 1", "1 of 50", "50 of 50"]
    wrongs: list[tuple[Any, Any, str]] = [
        (launch, [], "got the function launch"),
        (step, {"x": 1}, "a list"),
        (step, 7, "a list.*got 7"),
    ]
    for wrong, calls, told in wrongs:
        with pytest.raises(TypeError, match=told):
            tune_all(wrong, calls)


# -- what is told ----------------------------------------------------------------------------------


@on_each_rank()
def test_log_and_terminal_agree_with_the_records(rank: int):
    """Two sites, of which one candidate each cannot run: sites, candidates, winners and replays are
    those of the records.
    """
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    kernel = autotuned(blocks=(16, 32, 64, 2**21))  # Triton refuses the last one
    step = tuned(None, lambda x: [launch(kernel, x[:n]) for n in (64, 128)], n_warmup=1, n_repeat=2)
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        step(torch.zeros(128))
    end = log()[log().rindex(", tuned in ") :]
    for number, record in enumerate(sorted(step.records, key=lambda each: len(each.key)), 1):
        dropped = {each.index for each in record.candidates if each.failure is not None}
        assert dropped == {3}
        # By which the rows of the end are found.
        assert f"site {number} = tests.steps.add_kernel{record.key}: 4 configs" in log()
        assert re.search(rf"  site {number}  .*  BLOCK={record.best.fields['BLOCK']}  ", end)
        assert re.search(rf" site {number} = \S+\n(.*\n)+.* \d tried: .*1 cannot run here", end)
    assert re.search(rf" took \d.*\), {step.records[0].n_replays} replays", end)
    # The first rank's terminal has a line for each tuning and site, and one to read on; the other's
    # none.
    shown = [
        len(re.findall(rf"^{each}", terminal.getvalue(), re.MULTILINE))
        for each in ("dist_tune: tuning ", r"  add_kernel \[", "  why: ")
    ]
    assert shown == [1 - rank, 2 - 2 * rank, 1 - rank]
