"""Stopwatches without a GPU, and statistics."""

import statistics
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.measure.clocks import Span, WallClock, device_clock, is_capturing, median, spread, without_outliers

pytestmark = pytest.mark.once


def test_one_hiccup_moves_neither_median_nor_spread():
    samples = [2.0, 1.0, 3.0, 2.0, 1000.0]
    assert (median(samples), spread(samples)) == (2.0, 1.0)


def test_of_an_even_number_of_samples_the_lower_middle_one_counts():
    """Hiccups only ever add time. The spread has no such bias."""
    assert (median([1.0, 2.0, 4.0, 100.0]), spread([1.0, 2.0, 4.0, 100.0])) == (2.0, 1.5)
    assert (median([5.0]), spread([5.0])) == (5.0, 0.0)


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=20))
def test_spread_is_the_median_distance(samples: list[float]):
    """Never negative, zero for equal samples, and no larger than the range."""
    assert spread(samples) == statistics.median(abs(each - statistics.median(samples)) for each in samples)
    assert 0.0 <= spread(samples) <= max(samples) - min(samples)
    assert spread(samples[:1] * 3) == 0.0


def test_one_far_sample_of_five_is_left_out():
    """Of four it may be as right as the others; and equal samples have no spread to be measured by."""
    assert without_outliers([1.0, 1.01, 0.99, 1.02, 9.0]) == [1.0, 1.01, 0.99, 1.02]
    assert without_outliers([1.0, 1.01, 0.99, 9.0]) == [1.0, 1.01, 0.99, 9.0]
    assert without_outliers([1.0] * 5 + [1.004, 1.006]) == [1.0] * 5 + [1.004]


def test_more_outliers_than_a_limit_are_none():
    """A tenth of the samples may be accidents; a run that is slow every fourth time is so, and all its samples stay."""
    hiccups = [1.0] * 36 + [1.002, 9.0, 9.0, 9.0]
    assert without_outliers(hiccups, max_share=0.1) == hiccups[:37]
    for samples in ([*hiccups, 9.0, 9.0], [1.0, 1.0, 1.0, 5.0] * 10, [1.0] * 8 + [9.0]):
        assert without_outliers(samples, max_share=0.1) == samples


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=20))
def test_half_of_the_samples_are_no_outliers(samples: list[float]):
    """Those that stay are in their order, at least half of them, and any sample is one as far off as another that stays."""
    staying = without_outliers(samples)
    assert 2 * len(staying) >= len(samples)
    assert list(staying) == [each for each in samples if each in set(staying)]
    middle = statistics.median(samples)  # of an even number between two, unlike the package's own, which is the lower one
    furthest = max(abs(each - middle) for each in staying)
    assert all(each in staying for each in samples if abs(each - middle) <= furthest)


def test_wall_spans_measure_the_host_in_ms():
    """Each for itself: two that overlap, and one begun later."""
    clock = WallClock()
    outer, inner = clock.span(), clock.span()
    outer.begin()
    time.sleep(0.02)
    inner.begin()
    time.sleep(0.01)
    inner.end()
    outer.end()
    assert 10.0 <= inner.ms() < outer.ms() < 1000.0
    assert outer.ms() - inner.ms() >= 19.0
    assert inner.is_done()


def test_a_wall_clock_prepares_nothing():
    """The host is the device: it is not kept busy before a replay."""
    began = time.perf_counter()
    WallClock().prepare(lead_ms=10_000.0)
    assert time.perf_counter() - began < 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")
def test_without_a_gpu_the_clock_is_the_wall_and_nothing_captures():
    """No CUDA call fails or initialises anything."""
    clock = device_clock()
    span: Span = clock.span()
    assert isinstance(clock, WallClock)
    assert span.is_done()
    assert is_capturing() is False
    assert not torch.cuda.is_initialized()
