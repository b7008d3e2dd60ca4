"""How long a run takes: by a clock that the test turns, and that only right results are timed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_tune.errors import WrongResultError
from dist_tune.measure import benchmark, clocks
from dist_tune.measure.benchmark import Latency, benchmark_config, measure
from dist_tune.measure.clocks import WallClock

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "device_clock", WallClock)


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Turns the clock on by so many microseconds."""
    now = [0.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def turn(us: float) -> None:
        now[0] += us * 1e-6

    return turn


def taking(turn: Callable[[float], None], times_us: Iterator[float], result: Any = None) -> Callable[[], Any]:
    def run() -> Any:
        turn(next(times_us))
        return result

    return run


def rounded(latency: Latency) -> Latency:
    """To nanoseconds, since the clock counts seconds."""
    us = {name: round(getattr(latency, name), 3) for name in ("mean_us", "min_us", "median_us")}
    return replace(latency, **us)


def test_times_are_microseconds():
    """A sleep of 2 ms takes 2000 us, and not twice as long, by the best of ten: others may keep the machine busy."""
    latency = measure(lambda: time.sleep(0.002))
    assert 2000 <= latency.min_us < 4000
    assert latency.min_us <= latency.median_us <= 2 * latency.mean_us


def test_the_mean_is_over_timed_runs_alone(turn: Callable[[float], None]):
    """Five runs before them are slow, and do not count."""
    times_us = iter([*[900.0] * 5, 100.0, 104.0, 102.0, 98.0])
    latency = measure(taking(turn, times_us), num_iters=4)
    assert rounded(latency) == Latency(mean_us=101.0, min_us=98.0, median_us=101.0, n_samples=4, n_outliers=0)
    assert next(times_us, None) is None


def test_an_outlier_is_left_out(turn: Callable[[float], None]):
    """Of twenty one took fifty times as long, and one is too fast to be true: neither counts for anything but their number."""
    times_us = [100.0, 101.0, 99.0, 5000.0, 100.0, 102.0, 98.0, 3.0, 100.0, 100.0, *[100.0, 101.0, 99.0] * 3, 100.0]
    latency = measure(taking(turn, iter(times_us)), n_warmup=0, num_iters=20)
    assert rounded(latency) == Latency(mean_us=100.0, min_us=98.0, median_us=100.0, n_samples=18, n_outliers=2)


def test_a_run_that_is_slow_every_fourth_time_takes_what_it_takes_on_average(turn: Callable[[float], None]):
    """The slow ones are no outliers; one hiccup of forty is."""
    times_us = [1000.0, 1000.0, 1000.0, 5000.0] * 10
    latency = measure(taking(turn, iter(times_us)), n_warmup=0, num_iters=40)
    assert rounded(latency) == Latency(mean_us=2000.0, min_us=1000.0, median_us=1000.0, n_samples=40, n_outliers=0)
    us = benchmark_config(taking(turn, iter([1000.0] * 5 + times_us)), None, num_iters=40)
    assert round(us, 3) == 2000.0
    latency = measure(taking(turn, iter([1000.0] * 39 + [5000.0])), n_warmup=0, num_iters=40)
    assert (round(latency.mean_us, 3), latency.n_outliers) == (1000.0, 1)


def test_equal_times_have_no_outliers(turn: Callable[[float], None]):
    """Nothing is divided by their spread, which is zero."""
    assert measure(taking(turn, iter([100.0] * 7)), n_warmup=2, num_iters=5).n_samples == 5
    assert measure(taking(turn, iter([0.0] * 7)), n_warmup=2, num_iters=5).mean_us == 0.0


@pytest.mark.parametrize("num_iters", [0, -1])
def test_less_than_one_timed_run_is_refused(num_iters: int):
    with pytest.raises(ValueError, match=f"num_iters >= 1 and n_warmup >= 0, got {num_iters}"):
        measure(lambda: None, num_iters=num_iters)
    with pytest.raises(ValueError, match="num_iters >= 1"):
        benchmark_config(lambda: torch.ones(1), torch.ones(1), num_iters=num_iters)


def test_warm_up_runs_may_be_none_and_not_fewer():
    n_runs = count()
    assert measure(lambda: next(n_runs), n_warmup=0, num_iters=1).n_samples == 1
    assert next(n_runs) == 1
    with pytest.raises(ValueError, match="got 10 and -1"):
        measure(lambda: None, n_warmup=-1)


@pytest.mark.parametrize("ground_truth", [None, torch.ones(4)], ids=["unchecked", "checked"])
def test_an_error_of_the_run_is_passed_on(ground_truth: Any):
    """Whichever run it is that fails."""
    for n_right in (0, 1, 4, 9):
        answers = [torch.ones(4) for _ in range(n_right)]
        with pytest.raises(IndexError, match="pop from empty list"):
            benchmark_config(answers.pop, ground_truth, num_iters=10)


def test_a_wrong_result_is_not_timed():
    """An AssertionError, which says where and by how much; no ground truth checks nothing."""
    n_runs = count()

    def run() -> torch.Tensor:
        next(n_runs)
        return torch.tensor([1.0, 2.0])

    with pytest.raises(WrongResultError, match=r"wrong by 3 at \[1\]") as caught:
        benchmark_config(run, torch.tensor([1.0, 5.0]))
    assert isinstance(caught.value, AssertionError)
    assert next(n_runs) == 1
    assert benchmark_config(run, None) > 0


def test_a_run_that_does_not_write_is_not_timed():
    """Its memory holds the right answer."""
    out = torch.ones(4)
    with pytest.raises(WrongResultError, match="4 of 4 elements are not written"):
        benchmark_config(lambda: out, torch.ones(4))


def test_a_run_that_does_something_else_each_time_is_found():
    """Right at first, and wrong at the last of the timed runs."""
    n_runs = count()
    with pytest.raises(WrongResultError, match=r"after 12 runs: wrong by 1 .* A run must do the same"):
        benchmark_config(lambda: torch.full((4,), float(next(n_runs) < 10)), torch.ones(4), num_iters=7)


def test_tolerances_are_those_of_the_caller():
    """A tenth by default, of a tenth and of the expected value."""

    def run() -> torch.Tensor:
        return torch.tensor([0.09, 109.0])

    assert benchmark_config(run, torch.tensor([0.0, 100.0])) > 0
    with pytest.raises(WrongResultError):
        benchmark_config(run, torch.tensor([0.0, 100.0]), atol=1e-2)
    with pytest.raises(WrongResultError):
        benchmark_config(run, torch.tensor([0.0, 100.0]), rtol=1e-2)
