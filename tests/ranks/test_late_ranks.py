"""Ranks that are late, stopped or slow: waiting costs time and no job, and the log names the late one."""

from __future__ import annotations

import contextlib
import io
import re
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.testing import values
from tests.faults.jobs import stop_for
from tests.ranks.stuck import threads_left
from tests.steps import autotuned, best, launch, tuned
from tests.worlds import further, on_each_rank, on_ranks, same_error

IMPATIENT = {"DIST_TUNE_DEADLINE_S": "1"}


def _late(rank: int, face: str) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def work(x: torch.Tensor, block: int = 0) -> float:
        y = (launch(kernel, x) if face == "contextual" else x + 1).sum()
        dist.all_reduce(y)
        return float(y)

    step = tuned(kernel, work)
    if face == "function":
        step = autotune([{"block": 1}, {"block": 2}], key_fn=lambda x: x.numel(), n_warmup=0, n_repeat=1)(work)
    sums = []
    for n in (64, 128):
        time.sleep(2.5 if rank == 1 else 0.0)
        sums.append(step(torch.zeros(n)))
    return sums, len(step.records)


@pytest.mark.parametrize("face", ["contextual", further("function")])
def test_a_late_rank_costs_waiting_and_not_the_job(face: str):
    """More than two deadlines late, within the timeout of its group: all tune."""
    assert values(on_ranks(2, _late, face, env=IMPATIENT)) == [([128.0, 256.0], 2)] * 2


def _shown(rank: int, late: int) -> tuple[str, float]:
    step = tuned(autotuned(blocks=(16, 32)))
    dist.barrier()
    with contextlib.redirect_stderr(terminal := _Stamped()):
        time.sleep(3.2 if rank == late else 0.0)
        step(torch.zeros(64))
    return terminal.getvalue(), terminal.late_after_s


class _Stamped(io.StringIO):
    """A file, with the time at which a late rank was told in it."""

    late_after_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    def write(self, text: str) -> int:
        if "has not come" in text:
            self.late_after_s = time.monotonic() - self._began
        return super().write(text)


@pytest.mark.parametrize("late", [1, further(0)])
def test_a_late_rank_is_on_the_terminal_within_three_seconds(late: int):
    """On the first rank's, once; where that is the late one the next rank tells it. Nothing on others, nor where the user wants none."""
    for rank, (text, after_s) in enumerate(values(on_ranks(3, _shown, late, env={"DIST_TUNE_VERBOSITY": "normal"}))):
        told = re.findall(rf"^dist_tune: rank {late} has not come to call 1 of tuned.<lambda>, 2 s$", text, re.MULTILINE)
        assert len(told) == text.count("has not come") == (rank == (0 if late else 1))
        assert after_s < 3.5  # on a busy machine
    quiet = values(on_ranks(2, _shown, 1))
    assert [text for text, _ in quiet] == ["", ""]


def _in_first_run(rank: int, wait: str, seconds: float, timeout_s: float) -> Any:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=timeout_s))
    kernel, runs = autotuned(), []

    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) == 1:
            time.sleep(0.8)  # time to answer its peer that it is in this call
            stop_for(seconds) if wait == "stop" else time.sleep(seconds)
        return launch(kernel, x)

    call = tuned(kernel, step, group=group)
    call(torch.ones(64))
    return best(kernel), call.records[0].winner


WAITS = [("stop", 3.0, 60, "5"), ("sleep", 3.5, 1, "1"), further("sleep", 4.0, 60, "5"), further("stop", 8.0, 60, "5")]


@pytest.mark.parametrize(("wait", "seconds", "timeout_s", "deadline_s"), WAITS)
def test_a_rank_that_is_late_in_its_first_run_is_waited_for(wait: str, seconds: float, timeout_s: float, deadline_s: str):
    """Without a collective: one that runs longer than the deadline and its group's timeout, and one that is stopped for less than that."""
    outcomes = on_ranks(2, _in_first_run, wait, seconds, timeout_s, env={"DIST_TUNE_DEADLINE_S": deadline_s})
    first, second = values(outcomes)
    assert first == second
    assert re.findall(r"WARNING rank (\d) is late", outcomes[0].log) == ["1"]
    assert "rank 0 is late" not in outcomes[1].log
    assert "its first run of tests.ranks.test_late_ranks._in_first_run.<locals>.step, call 1" in outcomes[0].log
    assert wait == "sleep" or "rank 1 did not run for" in outcomes[1].log


def _slow(rank: int) -> Any:
    kernel, runs = autotuned(blocks=(16, 32)), [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        time.sleep(1.2 * rank * (runs[0] <= 5))
        return launch(kernel, x)

    y = tuned(kernel, step, reset=lambda: time.sleep(1.5 * rank if runs[0] == 1 else 0.0))(torch.zeros(64))
    return best(kernel), y[0].item(), threads_left()


def test_what_takes_long_for_good_reason_is_waited_for():
    """On one rank a first run, a reset and replays beyond the deadline: neither its own watchdog nor its peers give it up."""
    one, other = values(on_ranks(2, _slow, env=IMPATIENT))
    assert one == other
    assert one[1:] == (1.0, [])


def _comes_too_late(rank: int) -> None:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.5))
    step = tuned(autotuned(blocks=(16, 32)), group=group)
    time.sleep(2.5 if rank == 2 else 0.0)
    step(torch.zeros(64))


def test_a_rank_that_comes_too_late_gets_the_verdict_too():
    """Ranks 0 and 1 give rank 2 up, later than their group and the deadline; when it comes, it reads that and does not wait."""
    same_error(on_ranks(3, _comes_too_late, env=IMPATIENT), "AbsentRanksError", "ranks [2] did not come", within_s=5)


@on_each_rank()
def test_timeouts_are_lowered_only_while_ranks_tune(rank: int):
    """Not in a first run, nor for a call that merely has new shapes; and they are given back, also after an error."""
    kernel, seen = autotuned(blocks=(16, 32)), list[list[float]]()
    groups: list[Any] = [dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(seconds=0.5))]

    def note() -> None:
        seen.append([group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups])

    def step(x: torch.Tensor) -> None:
        note()
        if x.numel() == 96:
            raise ValueError("96")
        launch(kernel, torch.zeros(64))

    call = tuned(kernel, step)
    for n in (64, 65, 96):
        with pytest.raises(ValueError, match="96") if n == 96 else nullcontext():
            call(torch.zeros(n))
        note()
    usual, short = [60.0, 0.5], [3.0, 0.5]
    assert seen == [usual, *[short] * (len(seen) - 6), *[usual] * 5]
