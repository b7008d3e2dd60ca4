"""The time of one run, measured as it should be: warm, cold caches, outliers out, and only if its
result is right.

Knows clocks and checks, and nothing of candidates, search or ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dist_tune.errors import WrongResultError
from dist_tune.measure.checks import Checker, Matches
from dist_tune.measure.clocks import MAX_LEAD_MS, device_clock, wait_for_device
from dist_tune.measure.differences import difference
from dist_tune.search import without_outliers

_N_WARMUP = 5
_MAX_OUTLIERS = 0.1
"""Share of the timed runs.

A run that is slow more often than that is slow, and its mean says so.
"""


@dataclass(frozen=True, slots=True)
class Latency:
    """Time of a run in microseconds, outliers left out."""

    mean_us: float
    """Mean of the timed runs that count."""
    min_us: float
    """Fastest of them."""
    median_us: float
    """Median of them."""
    n_samples: int
    """Timed runs that count."""
    n_outliers: int
    """Timed runs left out: beyond 5 x the median absolute deviation (MAD), at most a tenth of all;
    0 if more are.
    """


def measure(
    run: Callable[[], Any], n_warmup: int = _N_WARMUP, num_iters: int = 10, *, is_cold: bool = True
) -> Latency:
    """Time ``run()``: ``n_warmup`` untimed runs, then ``num_iters`` timed ones.

    On a GPU by CUDA events around each run, with the device kept busy until the host has queued it,
    and with the L2 cache flushed before it (``is_cold``); elsewhere by the host's clock.

    Raises:
        ValueError: less than one timed run, or a negative number of others.
        Exception: errors of ``run``.
    """
    return _measure(run, n_warmup, num_iters, lambda result: "", is_cold=is_cold)


def benchmark_config(
    run: Callable[[], Any],
    ground_truth: Any,
    num_iters: int = 10,
    atol: float = 1e-1,
    rtol: float = 1e-1,
) -> float:
    """The average latency of ``run()`` in microseconds, without outliers (see ``Latency``), if it
    returns what it should.

    ``ground_truth``: what ``run()`` is to return: a tensor of any dtype, fp8 too, or tuples, lists
    and dicts of them, of the same shapes and dtypes, every element within ``atol + rtol *
    |expected|``; None checks nothing. Before a second run the memory of the first one's result is
    poisoned, so that a run which writes nothing, or not all, is found. Each timed run is checked as
    well, off the clock.

    Raises:
        WrongResultError: an ``AssertionError`` that says where the result is wrong, and by how
            much.
        Exception: errors of ``run``, as ``triton.OutOfResources``.
    """
    if ground_truth is None:
        return measure(run, num_iters=num_iters).mean_us
    if wrong := _wrong(run, ground_truth, rtol, atol):
        raise WrongResultError(wrong)
    return _measure(
        run,
        _N_WARMUP,
        num_iters,
        lambda result: difference(result, ground_truth, rtol, atol),
        is_cold=True,
    ).mean_us


def _wrong(run: Callable[[], Any], expected: Any, rtol: float, atol: float) -> str:
    """Why ``run()`` is wrong at once, or when it is repeated; empty if it is right."""

    def ground_truth() -> Any:
        return expected

    checker = Checker(Matches(ground_truth, rtol, atol), run, is_alone=True)
    try:
        for k in range(checker.n_runs):
            checker.begin((), {}, is_repeated=k > 0)
            if wrong := checker.judge(run(), (), {}):
                return wrong
    finally:
        checker.restore()
    return ""


def _measure(
    run: Callable[[], Any],
    n_warmup: int,
    num_iters: int,
    why_wrong: Callable[[Any], str],
    *,
    is_cold: bool,
) -> Latency:
    if num_iters < 1 or n_warmup < 0:
        raise ValueError(f"need num_iters >= 1 and n_warmup >= 0, got {num_iters} and {n_warmup}")
    clock = device_clock()
    host_ms, run_ms = 1.0, 0.0
    for k in range(n_warmup):
        if k == n_warmup - 1:
            wait_for_device()  # a full launch queue would be taken for the host's own time
        began = time.perf_counter()
        run()
        host_ms = (time.perf_counter() - began) * 1e3
        if k == n_warmup - 1:
            wait_for_device()
            run_ms = (time.perf_counter() - began) * 1e3
    spans = []
    for k in range(num_iters):
        # Until the host has queued the run; and the device rests for as long as it works, or it
        # would throttle at its power limit.
        clock.prepare(min(max(1.5 * host_ms, run_ms), MAX_LEAD_MS), is_cold=is_cold)
        span = clock.span()
        span.begin()
        result = run()
        span.end()
        spans.append(span)
        if wrong := why_wrong(result):
            told = "A run must do the same however often it is repeated."
            raise WrongResultError(
                f"timed run {k + 1} of {num_iters}, after {n_warmup} untimed ones: {wrong}. {told}"
            )
        result = None  # its memory is for the next one
    wait_for_device()
    times_us = [span.ms() * 1e3 for span in spans]
    counted = without_outliers(times_us, _MAX_OUTLIERS)
    return Latency(
        statistics.fmean(counted),
        min(counted),
        statistics.median(counted),
        len(counted),
        len(times_us) - len(counted),
    )
