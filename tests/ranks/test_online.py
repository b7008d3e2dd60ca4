"""Steps that may not be repeated, tuned in their own calls on one, two and four ranks: what is launched, what it costs, how it ends."""

from __future__ import annotations

import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, contextual_autotune
from dist_tune.distributed import Ranks
from dist_tune.runtime import interception
from dist_tune.testing import ExactTime, Outcome, values
from tests.ranks import online_steps
from tests.ranks.online_steps import Launches, online_threads, run_job, silent_steps
from tests.steps import accumulate_kernel, autotuned, best, is_unpatched, launch
from tests.worlds import gathered, log, on_each_rank, on_fake

FAKE: Any = {"modes": ("fake",)}
BLOCKS = (16, 32, 64, 128)
MS = {16: 1.0, 32: 0.5, 64: 0.25, 128: 0.8}


def launched_alike(launches: Launches) -> list[list[int]]:
    """What all ranks have launched in each call: the same, or this fails with the first call in which it was not."""
    ranks = gathered(launches.by_call)
    differing = [(k, calls) for k, calls in enumerate(zip(*ranks, strict=True)) if len({*map(tuple, calls)}) > 1]
    assert not differing, f"call {differing[0][0]} of {len(launches.by_call)}: {differing[0][1]}"
    return launches.by_call


def busy(rank: int, *, is_dist: bool, late: int = -1, **options: Any) -> Any:
    """A noisy job: times of launches vary, ranks sleep at random, and the fastest config is slow on the rank ``late``.

    Launches of ranks but the first have hiccups: where all ranks see one, or a rank alone, a candidate is taken for a hopeless one.
    """
    noise = random.Random(rank)
    ms = {**MS, 64: 0.75} if rank == late else MS
    launches = Launches(lambda block: ms[block] * (1 + 0.03 * noise.random()) * (4 if rank > 0 and noise.random() < 0.02 else 1))
    kernel, x, weight = autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=is_dist, max_slowdown=0.2, **options)
    def step(k: int) -> float:
        launch(kernel, x)
        ExactTime.pass_ms(1.0)
        if noise.random() < 0.1:
            time.sleep(noise.random() * 5e-3)
        weight.add_(1.0)
        if is_dist:
            total = weight.clone()
            dist.all_reduce(total)
            return float(total)
        return float(weight)

    return step, launches, kernel, weight


def slowest_decides(rank: int, n: int) -> None:
    step, launches, kernel, weight = busy(rank, is_dist=n > 1, late=n - 1 if n > 1 else -1)
    values = run_job(step, launches, is_dist=n > 1)
    calls = launched_alike(launches) if n > 1 else launches.by_call
    assert all(len(call) == 1 for call in calls)
    assert {block for (block,) in calls} == set(BLOCKS)
    winner = 32 if n > 1 else 64
    assert (best(kernel), [call[0] for call in calls[-5:]]) == ([winner], [winner] * 5)
    assert values == [n * (k + 1.0) for k in range(len(values))]
    assert float(weight) == len(values)


@on_each_rank(2, **FAKE)
def test_the_slowest_of_two_ranks_decides(rank: int):
    """Config 64 is the fastest on rank 0 alone; each call launches one config on both ranks, once, and the values are the untuned ones."""
    slowest_decides(rank, 2)


@on_each_rank(4, **FAKE)
def test_the_slowest_of_four_ranks_decides(rank: int):
    """Config 64 is slow on rank 3."""
    slowest_decides(rank, 4)


@on_each_rank(1, is_dist=False, **FAKE)
def test_a_rank_alone_finds_its_winner(rank: int):
    """No collective, and no other rank."""
    slowest_decides(rank, 1)


@on_each_rank(2, is_alone=True, **FAKE)
def test_ranks_that_drift_apart_launch_the_same_in_each_call(rank: int):
    """No collective holds them together: the winner is in force at the same number of a call, and none waits long."""
    launches, kernel, x, weight = Launches(MS.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step() -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    values, n_left, longest_s = list[float](), 5, 0.0
    while n_left and len(values) < 20_000:
        launches.by_call.append([])
        began = time.monotonic()
        values.append(step())
        longest_s = max(longest_s, time.monotonic() - began) if len(values) > 1 else 0.0
        n_left -= len(values) > 1 and not online_threads()
        time.sleep(1e-3)
    ranks = gathered(launches.by_call)
    n_calls = min(map(len, ranks))
    assert ranks[0][:n_calls] == ranks[1][:n_calls], [k for k in range(n_calls) if ranks[0][k] != ranks[1][k]][:5]
    assert (values, best(kernel)) == ([k + 1.0 for k in range(len(values))], [64])
    assert {block for call in ranks[0] for block in call} == set(BLOCKS)
    assert longest_s < 2.0


@on_each_rank(2, cases=[("calls", 1), ("in force", 0)], is_alone=True, **FAKE)
def test_a_thread_that_is_late_lets_no_rank_run_a_batch_alone(rank: int, case: tuple[str, int]):
    """One that votes after its step has come to the batch is a no of all; one that hears the verdict late has its call wait for it."""
    launches, kernel, x, weight = Launches(MS.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)
    own, n_met = Ranks.reduce, 0

    def reduce(ranks: Ranks, topic: str, *args: Any, **options: Any) -> Any:
        nonlocal n_met
        value = own(ranks, topic, *args, **options)
        n_met += topic == case[0]
        if (topic, rank) == case and n_met in (4, 6):  # after batches that try nothing yet, and that were quickly agreed on
            time.sleep(0.3)
        return value

    def plain() -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    plain.__qualname__ = f"step, {case[0]}"  # the ranks leave a case after different numbers of calls
    step = contextual_autotune(is_dist=True, max_slowdown=0.5)(plain)
    values, n_left = list[float](), 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "reduce", reduce)
        while n_left and len(values) < 20_000:
            launches.by_call.append([])
            values.append(step())
            n_left -= len(values) > 1 and not online_threads()
            time.sleep(1e-3)
    ranks = gathered(launches.by_call)
    n_calls = min(map(len, ranks))
    assert ranks[0][:n_calls] == ranks[1][:n_calls], [k for k in range(n_calls) if ranks[0][k] != ranks[1][k]][:5]
    assert (values, best(kernel)) == ([k + 1.0 for k in range(len(values))], [64])


@on_each_rank(2, is_alone=True, **FAKE)
def test_ranks_that_nothing_holds_together_share_no_trials(rank: int):
    """One takes many times as long for a call: the batches would begin later and later."""
    kernel, x, weight = autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step() -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    values = [step()]
    while online_threads() and len(values) < 400_000:
        values.append(step())
        time.sleep(2e-4 + rank * 2e-2)
    assert values == [k + 1.0 for k in range(len(values))]
    assert "calls apart: nothing in the step holds them together" in log()


@on_each_rank(2, **FAKE)
def test_a_step_neither_talks_nor_waits(rank: int):
    """From the second call on its thread asks no store, no event and no device, also where these are done calls later."""
    step, launches, kernel, _ = busy(rank, is_dist=True)
    with silent_steps(launches) as found:
        run_job(step, launches)
    assert not found, f"{len(found)} times, first in call {found[0].call}: {found[0].what}"
    launched_alike(launches)
    assert best(kernel) == [64]


@on_each_rank(1, is_dist=False, **FAKE)
def test_a_step_of_one_rank_neither_talks_nor_waits(rank: int):
    """As on two."""
    step, launches, kernel, _ = busy(rank, is_dist=False)
    with silent_steps(launches) as found:
        run_job(step, launches, is_dist=False)
    assert not found, f"{len(found)} times, first in call {found[0].call}: {found[0].what}"
    assert best(kernel) == [64]


# -- what it costs -----------------------------------------------------------------------------------------------------


@on_each_rank(2, cases=[0.05, 0.2], **FAKE)
def test_what_trials_take_stays_within_the_share(rank: int, share: float):
    """One config takes 30 times as long, and is launched once. Beyond that one launch the whole job takes at most this share longer."""
    ms = {16: 1.0, 32: 0.9, 64: 30.0, 128: 1.1}
    launches, kernel, x, weight = Launches(ms.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=True, max_slowdown=share)
    def step(k: int) -> float:
        launch(kernel, x)
        ExactTime.pass_ms(4.0)
        weight.add_(1.0)
        return float(weight)

    run_job(step, launches, n_more=1)
    calls = [call[-1] for call in launched_alike(launches)]  # the first is made twice, to see whether it may be
    assert (calls.count(64), best(kernel)) == (1, [32])
    job_ms, spent_ms, in_use = 0.0, 0.0, calls[0]
    worst = 0.0
    for block in calls:
        job_ms += 4.0 + ms[block]
        spent_ms += max(0.0, ms[block] - ms[in_use]) if block != 64 else 0.0
        in_use = min(in_use, block, key=ms.__getitem__)
        worst = max(worst, spent_ms / job_ms)
    assert spent_ms + 29.0 <= share * job_ms + 1.0, (spent_ms, job_ms)


@on_each_rank(1, is_dist=False, cases=[0, 0.0])
def test_without_a_share_nothing_is_tuned_online(rank: int, share: float):
    """The step goes on with its first config, and a line says that it is not tuned."""
    kernel, x, weight = autotuned(), torch.zeros(64), torch.zeros(1)

    @contextual_autotune(max_slowdown=share)
    def step() -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    assert ([step() for _ in range(5)], step.records, online_threads()) == ([1.0, 2.0, 3.0, 4.0, 5.0], [], [])
    assert "not tuned; split it, or give reset=" in log()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_slowdown": -0.1}, ValueError, "need max_slowdown >= 0, got -0.1"),
    ({"max_slowdown": 1.5}, ValueError, "need max_slowdown <= 1, a share of the job's time, got 1.5"),
    ({"max_slowdown": float("nan")}, ValueError, "max_slowdown"),
    ({"max_slowdown": "5%"}, TypeError, "max_slowdown"),
    ({"max_slowdown": True}, TypeError, "max_slowdown"),
    ({"max_slowdown": None}, TypeError, "max_slowdown"),
    ({"search": "online", "max_slowdown": 0}, ValueError, "max_slowdown=0"),
    ({"search": "online", "reset": print}, ValueError, "reset= is given"),
    ({"search": "on-line"}, ValueError, "online"),
]


@pytest.mark.once
@pytest.mark.parametrize("form", ["closure", "function"])
@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_bad_options_are_refused(form: str, options: dict[str, Any], kind: type[Exception], words: str):
    """When the decorator is made, in one line."""
    with pytest.raises(kind, match=words) as caught:
        contextual_autotune(**options) if form == "closure" else autotune([{"a": 1}, {"a": 2}], key=["x"], **options)
    assert "\n" not in str(caught.value)


@pytest.mark.once
def test_a_check_is_refused_where_no_call_is_repeated():
    """A function's result cannot be judged without another run."""
    with pytest.raises(ValueError, match="check= is given"):
        autotune([{"a": 1}, {"a": 2}], key=["x"], search="online", check=torch.equal)


# -- what fails --------------------------------------------------------------------------------------------------------


@on_each_rank(2, cases=["on one rank", "on all ranks"], **FAKE)
def test_a_launch_that_fails_is_made_again_in_its_call(rank: int, case: str):
    """The fastest config raises in its launch: the call's value is right, the config is out on all ranks, and the others have raced."""
    failed = list[int]()

    def ms(block: int) -> float:
        if block == 64 and (rank == 1 or case == "on all ranks"):
            failed.append(len(launches.by_call))
            raise RuntimeError("this config does not run here")
        return MS[block]

    launches, kernel, x, weight = Launches(ms), autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(k: int) -> float:
        launch(kernel, x)
        weight.add_(1.0)
        total = weight.clone()
        dist.all_reduce(total)
        return float(total)

    values = run_job(step, launches)
    assert values == [2 * (k + 1.0) for k in range(len(values))]
    assert (best(kernel), len(failed)) == ([32], int(rank == 1 or case == "on all ranks"))
    assert {each for call in launches.by_call for each in call} == set(BLOCKS)
    assert {call[-1] for call in launches.by_call if len(call) > 1} <= set(BLOCKS) - {64}
    (record,) = step.records
    assert [bool(each.failure) for each in record.candidates] == [False, False, True, False]
    assert "this config does not run here" in str(record.candidates[2].failure)


@on_each_rank(2, **FAKE)
def test_a_config_that_does_not_compile_never_runs(rank: int):
    """A block that is no power of two."""
    launches, x, weight = Launches({**MS, 48: 0.1}.__getitem__), torch.zeros(256), torch.zeros(1)
    kernel = autotuned(blocks=(*BLOCKS, 48))

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(k: int) -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    run_job(step, launches)
    assert {each for call in launched_alike(launches) for each in call} == set(BLOCKS)
    assert best(kernel) == [64]


@on_each_rank(2, cases=["on all ranks", "on rank 1 alone", "before the launch"], **FAKE)
def test_an_error_of_the_users_costs_a_call_and_no_more(rank: int, case: str):
    """Every seventh call raises, after its launch or before it, on all ranks or on one in a step without collectives."""
    launches, kernel, x, weight = Launches(MS.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(k: int) -> float:
        raises = k % 7 == 6 and (rank == 1 or "alone" not in case)
        if raises and "before" in case:
            raise StopIteration
        launch(kernel, x)
        weight.add_(1.0)
        if raises:
            raise ValueError("no more")
        return float(weight)

    def caught(k: int) -> float:
        try:
            return step(k)
        except (ValueError, StopIteration):
            return -1.0

    values = run_job(caught, launches)
    calls = launched_alike(launches)
    assert (is_unpatched(), online_threads()) == (True, [])
    assert values.count(-1.0) == (len(values) // 7 if rank == 1 or "alone" not in case else 0)
    assert best(kernel) == [64], log()
    assert {each for call in calls for each in call} == set(BLOCKS)


# -- keys --------------------------------------------------------------------------------------------------------------


@on_each_rank(2, cases=["in turn", "late", "on one rank"], **FAKE)
def test_each_shape_gets_its_winner(rank: int, case: str):
    """Two shapes in turn; one that begins after 40 calls; and one that rank 1 alone has, in addition to the one that all have."""
    launches, kernel, weight = Launches(MS.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(1)
    xs = [torch.zeros(256), torch.zeros(512)]

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(k: int) -> float:
        is_second = {"in turn": k % 2 == 1, "late": k >= 40 and k % 2 == 1, "on one rank": False}[case]
        launch(kernel, xs[is_second])
        if case == "on one rank" and rank == 1:
            launch(kernel, xs[1])
        weight.add_(1.0)
        return float(weight)

    values = run_job(step, launches)
    assert values == [k + 1.0 for k in range(len(values))]
    if case != "on one rank":
        launched_alike(launches)
    assert best(kernel) == [64] * (2 if case != "on one rank" or rank == 1 else 1)


# -- functions ---------------------------------------------------------------------------------------------------------


class Counted:
    """A function that counts its calls in what it has captured, and may not be repeated."""

    def __init__(self, rank: int, n_keys: int = 1, **options: Any) -> None:
        self.launches, self.n_calls, self.n = Launches(MS.__getitem__), [0], dist.get_world_size() if dist.is_initialized() else 1
        n_calls, by_call, xs = self.n_calls, self.launches.by_call, [torch.zeros(8 << k) for k in range(n_keys)]

        @autotune([{"block": block} for block in BLOCKS], key_fn=lambda x: tuple(x.shape), max_slowdown=0.5, **options)
        def counted(x: torch.Tensor, block: int) -> float:
            n_calls[0] += 1
            by_call[-1].append(block)
            late = rank == 1 and block == 64
            ExactTime.pass_ms(3 * MS[block] if late else MS[block])
            return x.numel() * n_calls[0]

        group: Any = {"autotune_pg": dist.group.WORLD} if self.n > 1 else {}
        self.function, self.step = counted, lambda k: counted(xs[k % n_keys], **group)


FORMS: Any = [{"search": "online"}, {}]


@pytest.mark.once
@on_each_rank(2, cases=FORMS)
def test_a_function_that_counts_is_tuned_in_its_calls_on_two_ranks(rank: int, case: Any):
    """Each call is made once, with one config on both ranks, chosen or by itself."""
    counted_once(Counted(rank, **case), 32)


@pytest.mark.once
@on_each_rank(1, is_dist=False, cases=FORMS)
def test_a_function_that_counts_is_tuned_in_its_calls(rank: int, case: Any):
    """On one rank."""
    counted_once(Counted(rank, **case), 64)


@pytest.mark.once
@on_each_rank(2, cases=[2, 3])
def test_the_keys_of_a_function_take_turns(rank: int, n_keys: int):
    """Each has its winner, and each call its own key's value."""
    counted_once(Counted(rank, n_keys, search="online"), 32)


def counted_once(job: Counted, winner: int) -> None:
    values = run_job(job.step, job.launches, is_dist=job.n > 1)
    calls = launched_alike(job.launches) if job.n > 1 else job.launches.by_call
    assert [len(call) for call in calls[1:]] == [1] * (len(calls) - 1)
    n_keys = len({value / (k + 1) for k, value in enumerate(values)})
    assert values == [(8 << k % n_keys) * (k + 1.0) for k in range(len(values))]
    assert {record.best.config for record in job.function.records} == {f"block={winner}"}
    assert (len(job.function.records), {block for call in calls for block in call}) == (n_keys, set(BLOCKS))
    assert [call[-1] for call in calls[-5:]] == [winner] * 5


# -- after it ----------------------------------------------------------------------------------------------------------


@on_each_rank(2, **FAKE)
def test_a_steady_call_is_what_it_was(rank: int):
    """After the tuning calls have the listener of a closure that was replayed, no thread of it is left, and Triton is as it was."""
    launches, kernel, x, weight, heard = Launches(MS.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1), list[str]()
    replayed = list[str]()

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(k: int) -> float:
        heard.append(type(interception.listener_here()).__name__)
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    @contextual_autotune(is_dist=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        replayed.append(type(interception.listener_here()).__name__)
        return launch(kernel, x)

    run_job(step, launches)
    layer(x)
    layer(x)
    assert heard[-5:] == [replayed[-1]] * 5
    assert {*heard} - {replayed[-1]} == {"Trials", "OnlineRuns"}
    ours = [each.name for each in threading.enumerate() if "dist_tune" in each.name]
    assert (is_unpatched(), {*ours} - {"dist_tune presence"}) == (True, set())
    waited = re.findall(r", (\d+) calls waited", log())
    assert int((waited or ["0"])[0]) <= len(launches.by_call) // 10


@on_each_rank(2, **FAKE)
def test_kernels_that_are_made_in_each_call_are_tuned(rank: int):
    """Two of them with one key and other configs: neither gets a config of the other's, though Python uses their places in memory again."""
    launches, x, weight = Launches(MS.__getitem__), torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(k: int) -> float:
        launch(autotuned(blocks=(16, 64)), x)
        launch(autotuned(accumulate_kernel, blocks=(32, 128)), x)
        weight.add_(1.0)
        return float(weight)

    run_job(step, launches)
    calls = launched_alike(launches)
    assert {tuple(call[-2:]) for call in calls} <= {(a, b) for a in (16, 64) for b in (32, 128)}
    assert calls[-5:] == [[64, 32]] * 5


@on_each_rank(2, cases=["reset_to_zero", "restore_value", "both"])
def test_real_calls_zero_and_restore_nothing(rank: int, case: str):
    """A kernel adds to its output: after k calls k times its input, as with a config that Triton knows; hooks as often as launches."""
    hooked, own = list[int](), list[bool]()
    names = {"reset_to_zero": ["y_ptr"], "restore_value": ["y_ptr"]}
    listed = [
        triton.Config({"BLOCK": block}, pre_hook=lambda nargs: hooked.append(nargs["BLOCK"]))  # as Triton calls it: all arguments
        for block in (16, 32, 64)
    ]
    options: Any = {name: value for name, value in names.items() if case in (name, "both")}
    kernel, x, y = autotuned(accumulate_kernel, configs=listed, **options), torch.ones(64), torch.zeros(64)

    @contextual_autotune(is_dist=True, search="online", max_slowdown=0.5)
    def step(k: int) -> float:
        launch(kernel, x, y)
        return float(y.sum())

    values = run_job(step)
    assert values == [64 * (k + 1.0) for k in range(len(values))]
    assert (len(hooked), own, best(kernel)) == (len(values), [], [64])


@on_each_rank(2, **FAKE)
def test_two_steps_that_share_a_kernel_are_tuned_beside_one_another(rank: int):
    """As a training and an evaluation step: each has its own calls and trials, and both end with the winner."""
    launches, kernel, x, weight = Launches(MS.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)

    def made(name: str) -> Any:
        def step() -> float:
            launch(kernel, x)
            weight.add_(1.0)
            return float(weight)

        step.__qualname__ = name
        return contextual_autotune(is_dist=True, max_slowdown=0.5)(step)

    train, evaluate = made("train"), made("evaluate")
    values = run_job(lambda k: train() if k % 3 else evaluate(), launches)
    assert values == [k + 1.0 for k in range(len(values))]
    assert ([call[0] for call in launched_alike(launches)[-3:]], best(kernel)) == ([64] * 3, [64])
    assert "is not tuned any further" not in log()


@on_each_rank(2, is_alone=True, **FAKE)
def test_a_step_that_is_decorated_anew_gives_its_values(rank: int):
    """Every 30 calls, in the middle of a tuning of the object before, whose calls do not come any more."""
    launches, kernel, x, weight = Launches(MS.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(256), torch.zeros(1)

    def step() -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    values, tuned = list[float](), None
    for k in range(200):
        launches.by_call.append([])
        tuned = tuned if k % 30 and tuned else contextual_autotune(is_dist=True, max_slowdown=0.5)(step)
        values.append(tuned())
        time.sleep(1e-3)
    assert values == [k + 1.0 for k in range(200)]
    assert len(launched_alike(launches)) == 200


@pytest.mark.once
@on_each_rank(1, cases=["before", "after"], is_dist=False, **FAKE)
def test_a_call_of_a_function_is_made_again_only_if_nothing_has_happened(rank: int, case: str):
    """A config that raises before the step has done anything costs nothing; after a write its error is the user's, once."""
    weight, raised = torch.zeros(1), 0

    @autotune([{"part": k} for k in range(3)], None, search="online", max_slowdown=1.0, cache=False)
    def step(part: int) -> float:
        if part == 1 and case == "before":
            raise ValueError("no such part")
        weight.add_(1.0)
        if part == 1:
            raise ValueError("no such part")
        time.sleep(1e-3 * (3 - part))
        return float(weight)

    values = list[float]()
    while len(values) < 3 or online_threads():
        try:
            values.append(step())
        except ValueError as error:
            raised += "may have changed something, so that the call is not made again" in error.__notes__[0]
            values.append(float(weight))
        assert len(values) < 5_000
    assert (values, raised) == ([k + 1.0 for k in range(len(values))], int(case == "after"))
    assert "is not tuned any further" not in log()


# -- jobs that end in the middle ---------------------------------------------------------------------------------------


def start(folder: Path, n: int, *options: Any) -> list[Outcome]:
    """One start of a job (see ``cut_off``), with the caches of the ones before."""
    cache = {"DIST_TUNE_CACHE_DIR": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
    return on_fake(n, online_steps.cut_off, *options, is_dist=n > 1, **cache)


@pytest.mark.once
@pytest.mark.processes
@pytest.mark.parametrize("talks", [False, True])
def test_a_job_goes_on_untuned_where_a_rank_dies(tmp_path: Path, talks: bool):
    """Rank 1 is killed between trials. Steps without a collective go on, and one line says so; with one its error is the user's."""
    first, second = start(tmp_path, 2, 2, 1, "killed", talks, 3000)
    assert second.error == "Died"
    assert not first.error, first.notes
    found = first.value
    assert (found["n_alive"] == 0 or talks, found["n_left"], bool(found["error"])) == (True, 0, talks)
    assert found["values"] == [k + 1.0 for k in range(len(found["values"]))]
    assert first.log.count("is not tuned any further") == 1


@pytest.mark.once
@pytest.mark.processes
@pytest.mark.parametrize(("n", "how"), [(1, ""), (2, ""), (2, "killed"), (2, "leaves")])
def test_a_job_that_ends_first_goes_on_in_its_next_start(tmp_path: Path, n: int, how: str):
    """Ended on all ranks or on one, or killed between trials: its journal is kept, and the next start takes its times from there."""
    outcomes = start(tmp_path, n, 2, *((1, how, False, 3000) if how else ()))
    assert [outcome.error for outcome in outcomes] == ["", "Died" * (how == "killed")][:n]
    assert list((tmp_path / "cache" / "journals").glob("*.jsonl"))
    ends = [line for each in outcomes for line in each.log.splitlines() if "is not tuned any further" in line]
    assert len(ends) == n - (how == "killed")
    if how != "killed":
        assert all("the program ended first after" in line and "timed calls are missing" in line for line in ends), ends
        assert not any(" ERROR " in each.log for each in outcomes)
    again = start(tmp_path, n, 4000)
    assert "candidates are taken from an earlier attempt's journal" in again[0].log
    for found in values(again):
        assert (found["best"], found["n_records"]) == ([64], 1)
    assert not list((tmp_path / "cache" / "journals").glob("*.jsonl"))


@on_each_rank(2, **FAKE)
def test_a_rank_that_was_alone_is_tuned_online_again(rank: int):
    """Rank 1 has met a shape without rank 0, so that shapes cost it no meeting any more; a later shape of both ranks gets its winner."""
    launches, kernel, weight = Launches(MS.__getitem__), autotuned(blocks=BLOCKS), torch.zeros(1)
    xs = [torch.zeros(n) for n in (256, 512, 1024)]

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(x: torch.Tensor) -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    run_job(lambda k: step(xs[0]), launches)
    step(xs[rank])
    dist.barrier()
    run_job(lambda k: step(xs[2]), launches)
    assert [config.kwargs["BLOCK"] for key, config in kernel.cache.items() if key[0] == 1024] == [64]
