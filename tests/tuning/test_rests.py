"""How far the host goes ahead of a device in a tuning, and how long the device rests, with a pretended device beside the interpreter."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.measure import Span
from dist_tune.replays.replays import Replayer
from dist_tune.tuning import tuning
from tests.steps import autotuned, launch
from tests.worlds import on_each_rank

LAUNCH_S = 0.004


class Device:
    """A clock whose device takes ``LAUNCH_S`` for each replay, while the host goes on."""

    def __init__(self) -> None:
        self.free_s = 0.0
        """Until then it works, or spins."""
        self.rests_s: list[tuple[int, float]] = []
        """Replays that were queued and not done when each lead began, and its length."""
        self.wholes: list[DeviceSpan] = []
        self.is_whole = False

    def prepare(self, lead_ms: float, *, is_cold: bool = True) -> None:
        """Spin, as the device's sleep does."""
        self.rests_s.append((sum(not span.is_done() for span in self.wholes), lead_ms / 1e3))
        self.free_s = max(self.free_s, time.perf_counter()) + lead_ms / 1e3
        self.is_whole = True

    def span(self) -> DeviceSpan:
        """Of a whole replay, if it is the first one after a lead."""
        span = DeviceSpan(self)
        self.wholes += [span] * self.is_whole
        self.is_whole = False
        return span

    def has_gap(self, span: DeviceSpan, *, is_covered: bool) -> bool:
        return False

    def launch_ms(self, span: DeviceSpan) -> float:
        return span.ms()


class DeviceSpan:
    """A stretch of the device's work, by the host's clock: a launch, or the replay around it, which ends with it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.begin_s = self.end_s = 0.0

    def begin(self) -> None:
        self.begin_s = max(self.device.free_s, time.perf_counter())

    def end(self) -> None:
        self.end_s = self.device.free_s = max(self.device.free_s, self.begin_s + LAUNCH_S)

    def has_begun(self) -> bool:
        return time.perf_counter() >= self.begin_s

    def is_done(self) -> bool:
        return time.perf_counter() >= self.end_s

    def ms(self) -> float:
        return (self.end_s - self.begin_s) * 1e3


@on_each_rank(1, is_dist=False)
def test_the_device_rests_and_the_host_is_few_replays_ahead(rank: int):
    """At its power limit a device throttles, and a candidate would pay for those before it; what a rest takes follows from replays done."""
    device, kernel, x = Device(), autotuned(blocks=(1, 2, 4, 8, 16, 32, 64, 128)), torch.arange(64.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "device_clock", lambda: device)
        contextual_autotune(is_dist=False, cache=False)(lambda: launch(kernel, x))()
    found = device.rests_s
    assert len(found) > 20
    assert max(n_waiting for n_waiting, _ in found) == 4
    assert 0.99 * LAUNCH_S <= min(rest_s for _, rest_s in found[5:]) < 3 * LAUNCH_S  # on a slow host it is longer


@on_each_rank(1, is_dist=False)
def test_each_timed_replay_has_as_many_clocks_in_it(rank: int):
    """Two events take some microseconds of the device. A site that is through runs untimed, and its replays must not look faster."""
    kernels = [autotuned(blocks=blocks) for blocks in ((16, 32), (16, 32, 64, 128, 256, 512))]
    begun, in_replays, x = list[Span](), dict[bool, set[int]]({True: set(), False: set()}), torch.arange(64.0)
    begin, run = Span.begin, Replayer.run

    def counted_begin(self: Span) -> None:
        begun.append(self)
        begin(self)

    def counted_run(self: Replayer, closure: Any, schedule: Any, whole: Any = None, *, times_launches: bool = False) -> Any:
        begun.clear()
        value = run(self, closure, schedule, whole, times_launches=times_launches)
        if times_launches:
            in_replays[any(trial.is_timed for trial in schedule.values())].add(len(begun))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Span, "begin", counted_begin)
        patch.setattr(Replayer, "run", counted_run)
        contextual_autotune(is_dist=False, cache=False)(lambda: [launch(kernel, x) for kernel in kernels])()
    assert in_replays == {True: {3}, False: {1}}
