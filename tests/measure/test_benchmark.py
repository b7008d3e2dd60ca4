"""How long a run takes: by a clock that the test turns, and that only right results are timed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from dist_tune.errors import WrongResultError
from dist_tune.measure import benchmark
from dist_tune.measure.benchmark import Latency, benchmark_config, measure
from dist_tune.measure.clocks import Clock
from dist_tune.measure.differences import difference


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "device_clock", lambda: Clock(is_cuda=False))


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Turns the clock on by so many microseconds."""
    now = [0.0]
    monkeypatch.setattr(Clock, "now", lambda: now[0])

    def turn(us: float) -> None:
        now[0] += us * 1e-6

    return turn


def taking(
    turn: Callable[[float], None], times_us: Iterator[float], result: Any = None
) -> Callable[[], Any]:
    def run() -> Any:
        turn(next(times_us))
        return result

    return run


def rounded(latency: Latency) -> Latency:
    """To nanoseconds, since the clock counts seconds."""
    us = {name: round(getattr(latency, name), 3) for name in ("mean_us", "min_us", "median_us")}
    return replace(latency, **us)


def test_times_are_microseconds():
    """A sleep of 2 ms takes 2000 us, and not ten times as long, by the best of ten: others may keep
    the machine busy.
    """
    latency = measure(lambda: time.sleep(0.002))
    assert 2000 <= latency.min_us < 20_000
    assert latency.min_us <= latency.median_us <= 2 * latency.mean_us


SLOW = [1000.0, 1000.0, 1000.0, 5000.0] * 10
OUTLIERS = [
    100.0,
    101.0,
    99.0,
    5000.0,
    100.0,
    102.0,
    98.0,
    3.0,
    100.0,
    100.0,
    *[100.0, 101.0, 99.0] * 3,
    100.0,
]


@pytest.mark.parametrize(
    ("warm_up", "times_us", "expected"),
    [
        pytest.param(
            [900.0] * 5,
            [100.0, 104.0, 102.0, 98.0],
            Latency(101.0, 98.0, 101.0, 4, 0),
            id="untimed runs do not count",
        ),
        pytest.param(
            [],
            OUTLIERS,
            Latency(100.0, 98.0, 100.0, 18, 2),
            id="two of twenty are left out, also one that is too fast",
        ),
        pytest.param(
            [],
            SLOW,
            Latency(2000.0, 1000.0, 1000.0, 40, 0),
            id="slow every fourth time is no outlier",
        ),
        pytest.param(
            [],
            [1000.0] * 39 + [5000.0],
            Latency(1000.0, 1000.0, 1000.0, 39, 1),
            id="one hiccup of forty is one",
        ),
        pytest.param(
            [9.0],
            [100.0] * 5,
            Latency(100.0, 100.0, 100.0, 5, 0),
            id="equal times have no spread to divide by",
        ),
        pytest.param([], [0.0] * 5, Latency(0.0, 0.0, 0.0, 5, 0), id="nor do times of zero"),
    ],
)
def test_the_mean_is_over_the_timed_runs_that_count(
    warm_up: list[float], times_us: list[float], expected: Latency, turn: Callable[[float], None]
):
    latency = measure(
        taking(turn, iter([*warm_up, *times_us])), n_warmup=len(warm_up), num_iters=len(times_us)
    )
    assert rounded(latency) == expected
    us = benchmark_config(taking(turn, iter([9.0] * 5 + times_us)), None, num_iters=len(times_us))
    assert round(us, 3) == expected.mean_us


def test_numbers_of_runs_are_checked():
    """At least one timed run; of the others there may be none."""
    for n_warmup, num_iters in ((0, 0), (5, -1), (-1, 10)):
        with pytest.raises(
            ValueError, match=f"num_iters >= 1 and n_warmup >= 0, got {num_iters} and {n_warmup}"
        ):
            measure(lambda: None, n_warmup, num_iters)
    n_runs = count()
    assert measure(lambda: next(n_runs), n_warmup=0, num_iters=1).n_samples == 1
    assert next(n_runs) == 1


@pytest.mark.parametrize("ground_truth", [None, torch.ones(4)], ids=["unchecked", "checked"])
def test_an_error_of_the_run_is_passed_on(ground_truth: Any):
    """Whichever run it is that fails."""
    for n_right in (0, 1, 4, 9):
        answers = [torch.ones(4) for _ in range(n_right)]
        with pytest.raises(IndexError, match="pop from empty list"):
            benchmark_config(answers.pop, ground_truth, num_iters=10)


def test_a_wrong_result_is_not_timed():
    """An AssertionError, which says where and by how much, also where a run is right at first; no
    ground truth checks nothing.
    """
    n_runs, out = count(), torch.ones(4)

    def run() -> torch.Tensor:
        return torch.full((4,), float(next(n_runs) < 10))

    with pytest.raises(WrongResultError, match=r"wrong by 4 at \[0\]") as caught:
        benchmark_config(run, torch.full((4,), 5.0))
    assert isinstance(caught.value, AssertionError)
    assert next(n_runs) == 1
    with pytest.raises(WrongResultError, match=r"4 of 4 elements are NaN.*not written"):
        benchmark_config(lambda: out, torch.ones(4))
    with pytest.raises(
        WrongResultError,
        match=r"timed run 2 of 7, after 5 untimed ones: wrong by 1 .* A run must do the same",
    ):
        benchmark_config(run, torch.ones(4), num_iters=7)
    assert benchmark_config(run, None) > 0


def test_each_timed_run_is_checked_and_no_check_is_timed(
    turn: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
):
    """A run in the middle that is wrong is found though later ones are right; the time of the
    checks is on no clock.
    """

    def slow_difference(*args: Any) -> str:
        turn(1e6)
        return difference(*args)

    monkeypatch.setattr(benchmark, "difference", slow_difference)
    for wrong in (None, *range(8, 13)):
        answers = iter([torch.full((4,), float(k == wrong)) for k in range(1, 13)])

        def run() -> torch.Tensor:
            turn(100.0)
            return next(answers)  # noqa: B023  # called in this turn alone

        if wrong is None:
            assert round(benchmark_config(run, torch.zeros(4), num_iters=5), 3) == 100.0
            assert next(answers, None) is None
        else:
            with pytest.raises(WrongResultError, match=f"timed run {wrong - 7} of 5"):
                benchmark_config(run, torch.zeros(4), num_iters=5)


def test_tolerances_are_those_of_the_caller():
    """A tenth by default, of a tenth and of the expected value."""
    expected = torch.tensor([0.0, 100.0])
    assert benchmark_config(lambda: torch.tensor([0.09, 109.0]), expected) > 0
    for rtol, atol in ((0.1, 1e-2), (1e-2, 0.1)):
        with pytest.raises(WrongResultError):
            benchmark_config(lambda: torch.tensor([0.09, 109.0]), expected, rtol=rtol, atol=atol)
