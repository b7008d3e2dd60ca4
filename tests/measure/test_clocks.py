"""Stopwatches without a GPU, the lead of the host, the garbage collector while kernels are timed, and statistics."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.measure import no_full_collections
from dist_tune.measure.clocks import (
    LONGEST_MS,
    MAX_LEAD_MS,
    Lead,
    Span,
    WallClock,
    device_clock,
    is_capturing,
    median,
    spread,
    without_outliers,
)

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


def after(host_ms: float, n_replays: int, *, waits: bool = False) -> tuple[Lead, list[bool]]:
    """The lead after some replays of a step, and which of them the host had queued before the device began."""
    lead, ahead = Lead(), []
    for _ in range(n_replays):
        lead_ms = lead.ms()
        ahead.append(not waits and host_ms < lead_ms)
        lead.add(lead_ms + host_ms if waits else host_ms, is_ahead=ahead[-1])
    return lead, ahead


@pytest.mark.parametrize(("host_ms", "n_missed"), [(0.3, 0), (4.3, 0), (9.0, 0), (12.0, 1), (25.0, 2), (60.0, 2), (80.0, 3), (95.0, 3)])
def test_the_host_is_ahead_from_the_first_replays_on(host_ms: float, n_missed: int):
    """Three untimed ones come before those that count."""
    _, ahead = after(host_ms, 8)
    assert ahead == [False] * n_missed + [True] * (8 - n_missed)


@pytest.mark.parametrize(("host_ms", "lead_ms"), [(0.3, 0.45), (4.3, 6.45), (25.0, 28.0), (60.0, 63.0)])
def test_a_lead_is_half_as_long_again_as_the_host_needs_but_for_long_hosts(host_ms: float, lead_ms: float):
    assert after(host_ms, 8)[0].ms() == pytest.approx(lead_ms)


@pytest.mark.parametrize("host_ms", [0.5, 20.0, 400.0])
def test_a_step_that_waits_for_its_device_has_no_long_lead(host_ms: float):
    assert after(host_ms, 4, waits=True)[0].ms() <= MAX_LEAD_MS


def test_a_lead_has_an_end():
    """A host that needs a second cannot be outrun."""
    lead = Lead()
    for _ in range(20):
        assert lead.ms() <= LONGEST_MS
        lead.add(1000.0, is_ahead=False)
    assert lead.ms() <= MAX_LEAD_MS


def test_what_is_queued_keeps_the_device_busy_as_well():
    lead, _ = after(4.0, 3)
    assert [lead.ms(1.0, n_queued) for n_queued in (2, 3, 50)] == pytest.approx([4.0, 3.0, 1.0])


@pytest.mark.parametrize(
    ("shortest_ms", "n_queued", "lead_ms"),
    [(0.3, 0, 0.45), (0.3, 1, 0.3), (2.5, 0, 2.5), (2.5, 100, 2.5), (80.0, 0, MAX_LEAD_MS), (80.0, 100, MAX_LEAD_MS)],
)
def test_the_device_works_half_of_the_time_at_most(shortest_ms: float, n_queued: int, lead_ms: float):
    """However much is queued: at its power limit a candidate would pay for those before it."""
    assert after(0.3, 8)[0].ms(shortest_ms, n_queued) == pytest.approx(lead_ms)


def test_a_full_launch_queue_is_no_slow_host():
    """The host was ahead all the same."""
    lead, _ = after(1.0, 3)
    lead.add(80.0, is_ahead=True)
    assert lead.ms() == pytest.approx(1.65)


def test_a_host_that_is_slow_every_second_time_is_a_slow_host():
    lead, _ = after(40.0, 8)
    lead.add(1.0, is_ahead=True)
    assert lead.ms() > 30.0


def test_after_some_slow_replays_a_long_lead_is_tried_again():
    """A host that was busy for a while, and then needs 40 ms as before."""
    lead, _ = after(40.0, 8)
    for _ in range(8):
        lead.add(200.0, is_ahead=False)
    assert lead.ms() <= MAX_LEAD_MS
    ahead = []
    for _ in range(20):
        ahead.append(lead.ms() > 40.0)
        lead.add(40.0, is_ahead=ahead[-1])
    assert all(ahead[-8:])


def test_a_hiccup_of_the_host_is_forgotten():
    lead, _ = after(1.0, 3)
    lead.add(80.0, is_ahead=False)
    for _ in range(6):
        lead.add(1.0, is_ahead=True)
    assert lead.ms() == pytest.approx(1.5)


@contextmanager
def _full_collections() -> Iterator[list[int]]:
    """Numbers of objects that the collector leaves alone, at each collection of the oldest generation meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(gc.get_freeze_count())

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def test_the_oldest_objects_are_left_alone_and_none_is_collected_twice_for_it_afterwards():
    """As many new objects as make Python collect all: within, none does; afterwards once, as without a tuning."""
    gc.collect()
    n, before = len(gc.get_objects()), gc.get_threshold()
    with _full_collections() as found:
        with no_full_collections():
            kept = [[i] for i in range(max(n, 200_000))]
        assert found == []
        kept += [[i] for i in range(max(n, 200_000) // 4)]
    assert found == [0]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_threshold_that_the_program_sets_meanwhile_stays():
    """It is the program's."""
    before = gc.get_threshold()
    try:
        with no_full_collections():
            gc.set_threshold(1000, 5, 5)
        assert gc.get_threshold() == (1000, 5, 5)
    finally:
        gc.set_threshold(*before)


def test_a_program_that_sets_the_youngest_generation_alone_has_its_full_collections_again():
    """``gc.set_threshold(0)`` around a step of its own: the others stay as they are for it, and were raised by the tuning."""
    young, middle, old = before = gc.get_threshold()
    try:
        with no_full_collections():
            gc.set_threshold(young + 1)
        assert gc.get_threshold() == (young + 1, middle, old)
    finally:
        gc.set_threshold(*before)
