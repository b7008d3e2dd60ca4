"""Stopwatches without a GPU, the lead of the host, the garbage collector while kernels run."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dist_tune.measure import RngState, Span, clocks, no_full_collections
from dist_tune.measure.clocks import (
    LONGEST_MS,
    MAX_LEAD_MS,
    Clock,
    Lead,
    device_clock,
    is_capturing,
)


def test_wall_spans_measure_the_host_in_ms():
    """Each for itself: two that overlap, and one begun later.

    The host is the device, and is not kept busy before.
    """
    clock = Clock(is_cuda=False)
    outer, inner = clock.span(), clock.span()
    clock.prepare(lead_ms=10_000.0)
    outer.begin()
    time.sleep(0.02)
    inner.begin()
    time.sleep(0.01)
    inner.end()
    outer.end()
    assert 10.0 <= inner.ms() < outer.ms() < 1000.0
    assert outer.ms() - inner.ms() >= 19.0
    assert inner.is_done()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")
def test_without_a_gpu_the_clock_is_the_wall_and_nothing_captures():
    """No CUDA call fails or initialises anything, and the generators have no state of a GPU."""
    assert not device_clock().is_cuda
    assert is_capturing() is False
    assert RngState().torch_cuda is None
    assert not torch.cuda.is_initialized()


def after(host_ms: float, n_replays: int, *, waits: bool = False) -> tuple[Lead, list[bool]]:
    """The lead after some replays of a step, and which of them the host had queued before the
    device began.
    """
    lead, ahead = Lead(), []
    for _ in range(n_replays):
        lead_ms = lead.ms()
        ahead.append(not waits and host_ms < lead_ms)
        lead.add(lead_ms + host_ms if waits else host_ms, is_ahead=ahead[-1])
    return lead, ahead


@pytest.mark.parametrize(
    ("host_ms", "n_missed"),
    [(0.3, 0), (4.3, 0), (9.0, 0), (12.0, 1), (25.0, 2), (60.0, 2), (80.0, 3), (95.0, 3)],
)
def test_the_host_is_ahead_from_the_first_replays_on(host_ms: float, n_missed: int):
    """Three untimed ones come before those that count."""
    _, ahead = after(host_ms, 8)
    assert ahead == [False] * n_missed + [True] * (8 - n_missed)


@pytest.mark.parametrize(
    ("host_ms", "shortest_ms", "n_queued", "lead_ms"),
    [
        # half as long again as the host needs, but for long hosts
        (0.3, 0.0, 0, 0.45),
        (4.3, 0.0, 0, 6.45),
        (25.0, 0.0, 0, 28.0),
        (60.0, 0.0, 0, 63.0),
        # what is queued keeps the device busy as well
        (4.0, 1.0, 2, 4.0),
        (4.0, 1.0, 3, 3.0),
        (4.0, 1.0, 50, 1.0),
        # the device works half of the time at most: at its power limit a candidate would pay for
        # those before it
        (0.3, 0.3, 0, 0.45),
        (0.3, 0.3, 1, 0.3),
        (0.3, 2.5, 100, 2.5),
        (0.3, 80.0, 0, MAX_LEAD_MS),
        (0.3, 80.0, 100, MAX_LEAD_MS),
    ],
)
def test_a_lead_is_as_long_as_the_host_needs_and_the_device_rests(
    host_ms: float, shortest_ms: float, n_queued: int, lead_ms: float
):
    assert after(host_ms, 8)[0].ms(shortest_ms, n_queued) == pytest.approx(lead_ms)


def test_a_step_that_waits_for_its_device_has_no_long_lead():
    """Nor has a host that needs a second, which cannot be outrun."""
    for host_ms in (0.5, 20.0, 400.0):
        assert after(host_ms, 4, waits=True)[0].ms() <= MAX_LEAD_MS
    lead = Lead()
    for _ in range(20):
        assert lead.ms() <= LONGEST_MS
        lead.add(1000.0, is_ahead=False)
    assert lead.ms() <= MAX_LEAD_MS


@pytest.mark.parametrize(
    ("before_ms", "odd_ms", "is_ahead", "n_after", "lead_ms"),
    [
        pytest.param(
            1.0,
            80.0,
            True,
            0,
            1.65,
            id="a full launch queue is no slow host: it was ahead all the same",
        ),
        pytest.param(1.0, 80.0, False, 6, 1.5, id="a hiccup of the host is forgotten"),
        pytest.param(
            40.0, 1.0, True, 0, 35.0, id="a host that is slow every second time is a slow host"
        ),
    ],
)
def test_one_odd_replay_says_little(
    before_ms: float, odd_ms: float, is_ahead: bool, n_after: int, lead_ms: float
):
    lead, _ = after(before_ms, 8)
    lead.add(odd_ms, is_ahead=is_ahead)
    for _ in range(n_after):
        lead.add(before_ms, is_ahead=True)
    assert lead.ms() == pytest.approx(lead_ms)


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


@contextmanager
def _full_collections() -> Iterator[list[int]]:
    """Numbers of objects that the collector leaves alone, at each collection of the oldest
    generation meanwhile.
    """
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
    """As many new objects as make Python collect all: within, none does; afterwards once, as
    without a tuning.
    """
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


def test_thresholds_that_the_program_sets_meanwhile_stay():
    """They are the program's; where it sets the youngest alone, the others are as they were before
    the tuning.
    """
    before = gc.get_threshold()
    try:
        for own in ((1000, 5, 5), (1000,)):
            with no_full_collections():
                gc.set_threshold(*own)
            assert gc.get_threshold() == (*own, *before[len(own) :])
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)


# -- launches on a device that waits for its host --------------------------------------------------


class Gpu:
    """A device with a queue: how long its work takes is set, and the host's clock moves as it is
    told.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host_s, self.free_s = 1.0, 0.0
        self.spins_ms: list[float] = []
        patch.setattr(time, "perf_counter", lambda: self.host_s)
        patch.setattr(clocks, "spin", self.spin)
        patch.setattr(clocks, "DeviceEvent", lambda: GpuEvent(self))
        patch.setattr(clocks, "events_ms", lambda device: 0.003)
        patch.setattr(clocks, "api", SimpleNamespace(current_device=lambda: 0))
        # A torch with CUDA would look for a driver.
        patch.setattr(clocks, "current_device", lambda: 0)

    def spin(self, ms: float) -> None:
        self.spins_ms.append(ms)
        self.work(ms)

    def work(self, ms: float) -> None:
        self.free_s = max(self.free_s, self.host_s) + ms / 1e3

    def launch(
        self,
        clock: Clock,
        ms: float,
        host_ms: float = 0.04,
        *,
        is_covered: bool = False,
        hook_ms: float = 0.0,
    ) -> tuple[Span, bool]:
        """A kernel of ``ms`` that takes the host ``host_ms`` to launch, after its hook."""
        span = clock.span(is_covered=is_covered)
        self.host_s += hook_ms / 1e3
        span.begin()
        self.host_s += host_ms / 1e3
        self.work(ms)
        span.end()
        return span, clock.has_gap(span)


class GpuEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at_s = max(self.gpu.free_s, self.gpu.host_s)

    def query(self) -> bool:
        return self.gpu.host_s > self.at_s

    def elapsed_time(self, end: GpuEvent) -> float:
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_launch_on_an_idle_device_has_a_gap(gpu: Gpu):
    """40 us of the host are no part of a kernel of 2; with work queued before it, there is none."""
    clock = Clock(is_cuda=True)
    assert gpu.launch(clock, 0.002)[1]
    gpu.work(5.0)
    span, has_gap = gpu.launch(clock, 0.1)
    assert not has_gap
    assert clock.launch_ms(span) == pytest.approx(0.097)  # without what two events take


def test_a_device_that_spins_meanwhile_has_none(gpu: Gpu):
    clock = Clock(is_cuda=True)
    span, has_gap = gpu.launch(clock, 0.05, is_covered=True)
    assert not has_gap
    assert clock.launch_ms(span) == pytest.approx(0.047)


def test_a_hook_of_any_length_is_no_gap(gpu: Gpu):
    """The device spins after it: a kernel whose hook takes 150 ms has its own time."""
    clock = Clock(is_cuda=True)
    span, has_gap = gpu.launch(clock, 0.05, is_covered=True, hook_ms=150.0)
    assert not has_gap
    assert clock.launch_ms(span) == pytest.approx(0.047)


def test_one_spin_covers_launches_that_follow_at_once(gpu: Gpu):
    """And a launch that comes later has its own."""
    clock = Clock(is_cuda=True)
    for _ in range(3):
        gpu.launch(clock, 0.002, host_ms=0.01, is_covered=True)
    assert len(gpu.spins_ms) == 1
    gpu.host_s += 1.0
    gpu.launch(clock, 0.002, is_covered=True)
    assert len(gpu.spins_ms) == 2


def test_the_spin_grows_where_the_host_is_slower(gpu: Gpu):
    """A host that takes 0.3 ms for a launch: after two that have a gap there is none, and no spin
    is longer than it may be.
    """
    clock = Clock(is_cuda=True)
    found = []
    for _ in range(4):
        found.append(gpu.launch(clock, 0.002, host_ms=0.3, is_covered=True)[1])
        gpu.host_s += 1.0
    assert found == [True, True, False, False]
    for _ in range(5):
        gpu.launch(clock, 0.002, host_ms=5.0, is_covered=True)
        gpu.host_s += 1.0
    assert max(gpu.spins_ms) == clocks.MAX_COVER_MS


def test_a_tiny_kernel_keeps_a_time(gpu: Gpu):
    """Of a span that is no longer than its events a tenth is left: no time is negative."""
    clock = Clock(is_cuda=True)
    gpu.work(5.0)
    span, _ = gpu.launch(clock, 0.002)
    assert clock.launch_ms(span) == pytest.approx(0.0002)
