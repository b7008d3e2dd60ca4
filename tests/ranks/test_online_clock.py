"""What a job that is tuned online is told: the clock of its calls, its end in each phase, its next start; and what trials may cost it."""

from __future__ import annotations

import atexit
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from triton.runtime.jit import JITFunction

from dist_tune import contextual_autotune
from dist_tune.measure import Clock
from dist_tune.report import render, story_of_folder, text
from dist_tune.testing import ExactTime, values
from tests.ranks.online_steps import Launches, online_threads, run_job
from tests.steps import accumulate_kernel, add_kernel, autotuned, best, launch, shift_kernel
from tests.worlds import log, on_each_rank, on_fake

FAKE: Any = {"modes": ("fake",)}
MS = {16: 1.0, 32: 0.5, 64: 0.25, 128: 0.8, 256: 0.7, 512: 0.6}


def made(**options: Any) -> tuple[Any, Launches, Any]:
    """A step that counts itself: one kernel, and 4 ms of other work."""
    launches, kernel = Launches(MS.__getitem__), autotuned(blocks=tuple(MS))
    x, weight = torch.zeros(256), torch.zeros(1)

    def step(k: int = 0) -> float:
        launch(kernel, x)
        ExactTime.pass_ms(4.0)
        weight.add_(1.0)
        if dist.is_initialized():
            dist.all_reduce(weight.clone())
        return float(weight)

    tuned = contextual_autotune(is_dist=dist.is_initialized(), **options)(step)
    return tuned, launches, kernel


# -- what it says of itself --------------------------------------------------------------------------------------------


@on_each_rank(2, **FAKE)
def test_the_step_is_told_by_its_calls_before_and_after(rank: int):
    """6 ms with the first config, 5.25 with the winner: the job's own calls, in which nothing was tried."""
    step, launches, kernel = made(max_slowdown=0.3)
    run_job(step, launches)
    assert best(kernel) == [64]
    told = re.search(r"step ([\d.]+) -> ([\d.]+) ms", log())
    assert told is not None
    assert [float(ms) for ms in told.groups()] == pytest.approx([6.0, 5.25], abs=0.15)
    assert "slowest rank" not in log()


@on_each_rank(2, **FAKE)
def test_a_job_s_own_pauses_are_not_the_tuning_s(rank: int):
    """A checkpoint of half a second every 40 calls, and a loader that is late: told is what trials have taken."""
    step, launches, _ = made(max_slowdown=0.05)
    dice = random.Random(0)

    def call(k: int) -> float:
        ExactTime.pass_ms(500.0 if k % 40 == 17 else 20.0 if dice.random() < 0.05 else 0.0)
        return float(step(k))

    run_job(call, launches)
    told = re.search(r"which took ([\d.]+)% of the job's time \(at most 5%\)", log())
    assert told is not None
    assert float(told[1]) <= 6.0


# -- the end of a program ----------------------------------------------------------------------------------------------


def short(rank: int, n_calls: int) -> dict[str, Any]:
    """A job of so many calls, or until it is tuned."""
    step, launches, kernel = made(max_slowdown=0.3)
    n_made = 0
    for _ in range(n_calls):
        launches.by_call.append([])
        step()
        n_made += 1
        is_over = torch.tensor(float(bool(step.records)))
        if dist.is_initialized():
            dist.all_reduce(is_over, dist.ReduceOp.MIN)
        if is_over:
            break
        time.sleep(1e-3)
    atexit._run_exitfuncs()
    return {"n_calls": n_made, "is_tuned": bool(step.records), "best": best(kernel)}


def run(folder: Path, n: int, n_calls: int) -> tuple[list[Any], list[str]]:
    """One start of such a job on ``n`` ranks, and the logs."""
    env = {
        "DIST_TUNE_CACHE_DIR": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "DIST_TUNE_LOG_DIR": str(folder / "logs"),
    }
    outcomes = on_fake(n, short, n_calls, is_dist=n > 1, **env)
    return values(outcomes), [(folder / f"logs/rank-{rank}.log").read_text() for rank in range(n)]


@pytest.mark.once
@pytest.mark.processes
@pytest.mark.parametrize("n_calls", [1, 2, 10, 60])
def test_the_end_of_a_program_is_told_in_each_phase(tmp_path: Path, n_calls: int):
    """In its first call, among plain calls, in the race: once a rank, how far it came, and that the next start goes on. No error."""
    _, logs = run(tmp_path, 2, n_calls)
    for each in logs:
        (told,) = [line for line in each.splitlines() if "not tuned any further" in line]
        assert "the program ended first" in told
        assert "the next start goes on from there" in told
        assert " ERROR " not in each
    story = text(story_of_folder(tmp_path / "logs"))
    assert story.count("the program ended first") == 1
    assert "had not ended" not in story


@pytest.mark.once
@pytest.mark.processes
def test_a_report_has_each_kernel_of_an_online_tuning_once(tmp_path: Path):
    """The call that found that it may not be repeated hands its kernels on."""
    (found, *_), _ = run(tmp_path, 2, 2000)
    assert found["is_tuned"]
    story = story_of_folder(tmp_path / "logs")
    assert text(story).count("add_kernel [256]") == 1
    assert "had not ended" not in text(story)
    assert render(story)


@pytest.mark.once
@pytest.mark.processes
def test_a_job_in_short_pieces_is_tuned(tmp_path: Path):
    """Each start goes on with the times of those before; some tens of calls of each are plain, before its first trial."""
    (whole, *_), _ = run(tmp_path / "whole", 2, 4000)
    assert whole["is_tuned"]
    n_calls, n_starts, n_of_start = 0, 0, max(100, whole["n_calls"] // 3)
    while n_starts < 12:
        n_starts += 1
        (found, *_), logs = run(tmp_path / "pieces", 2, n_of_start)
        n_calls += found["n_calls"]
        if found["is_tuned"] or re.search(r"tuned in \d+ calls", logs[0]):
            break
    assert n_starts > 1
    assert found["best"] == whole["best"] == [64]
    assert n_calls <= 12 * n_of_start - 1


# -- what trials cost --------------------------------------------------------------------------------------------------


@on_each_rank(1, is_dist=False, **FAKE)
def test_no_launch_of_the_second_call_compiles(rank: int):
    """The first call runs what compiles fastest, the next ones the first config: for both kinds of an argument that it has met."""
    kernel = autotuned(shift_kernel, blocks=(128, 16, 32))
    x, weight, mine = torch.zeros(256), torch.zeros(1), threading.get_ident()

    @contextual_autotune(search="online", cache=False)
    def step() -> float:
        for shift in (7, 16, 1):
            kernel[(1,)](x, x, 256, shift)
        weight.add_(1.0)
        return float(weight)

    compiled, own = list[str](), JITFunction._do_compile

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == mine:
            compiled.append(self.fn.__name__)
        return own(self, *args, **kwargs)

    step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", noted)
        step()
    assert compiled == []


@on_each_rank(2, **FAKE)
def test_a_launch_of_another_thread_is_no_trial(rank: int):
    """While a call tries a config, a thread of the program's launches the same kernel: with what is in use, and as often as it says."""
    launches, kernel, x, weight = Launches(MS.__getitem__), autotuned(blocks=(16, 64)), torch.zeros(256), torch.zeros(1)
    beside = list[int]()

    def other() -> None:
        n = len(launches.by_call[-1])
        launch(kernel, x)
        beside.append(launches.by_call[-1].pop(n))

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(k: int) -> float:
        thread = threading.Thread(target=other)
        if k > 2:
            thread.start()
            thread.join()
        launch(kernel, x)
        weight.add_(1.0)
        dist.all_reduce(weight.clone())
        return float(weight)

    found = run_job(step, launches)
    assert best(kernel) == [64]
    assert found == [k + 1.0 for k in range(len(found))]
    tried = [call[-1] for call in launches.by_call]
    first_trial = tried.index(64)
    assert beside[first_trial - 3] == 16


@on_each_rank(2, **FAKE)
def test_kernels_whose_times_hold_gaps_are_not_chosen_by_them(rank: int):
    """The device waits for the host in each launch of one kernel: it keeps its config, and the reason says so."""
    launches = Launches(MS.__getitem__)
    kernels = autotuned(add_kernel, blocks=(16, 64)), autotuned(accumulate_kernel, blocks=(16, 64))
    x, weight = torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=True, max_slowdown=0.5)
    def step(k: int) -> float:
        for each in kernels:
            launch(each, x)
        weight.add_(1.0)
        dist.all_reduce(weight.clone())
        return float(weight)

    def has_gap(self: Clock, span: Any, *, is_covered: bool = False) -> bool:
        return len(launches.by_call[-1]) == 2  # of the second launch of a call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "has_gap", has_gap)
        run_job(step, launches)
    assert [best(each) for each in kernels] == [[64], [16]]
    reasons = {each.kernel.rpartition(".")[2]: each.reason for each in step.records}
    assert "the device waited for the host in each of its launches" in reasons["accumulate_kernel"]
    assert not online_threads()
