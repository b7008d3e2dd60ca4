"""How far the host goes ahead of a device in a tuning, and how long the device rests, with a pretended device beside the interpreter."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.measure import Span
from dist_tune.replays.replays import Replayer
from dist_tune.testing import on_ranks, values
from dist_tune.tuning import tuning
from tests.ranks.kernels import autotuned, launch

pytestmark = [pytest.mark.once, pytest.mark.processes]
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
        if self.is_whole:
            self.wholes.append(span)
        self.is_whole = False
        return span


class DeviceSpan:
    """A stretch of the device's work: a launch, or the replay around it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.begin_s = self.end_s = 0.0

    def begin(self) -> None:
        """Work begins when the device is free."""
        self.begin_s = max(self.device.free_s, time.perf_counter())

    def end(self) -> None:
        """All work is the launch's; a replay around it ends with it."""
        self.end_s = max(self.device.free_s, self.begin_s + LAUNCH_S)
        self.device.free_s = self.end_s

    def has_begun(self) -> bool:
        """By the host's clock."""
        return time.perf_counter() >= self.begin_s

    def is_done(self) -> bool:
        """By the host's clock."""
        return time.perf_counter() >= self.end_s

    def ms(self) -> float:
        """Milliseconds of work."""
        return (self.end_s - self.begin_s) * 1e3


def leads(rank: int) -> list[tuple[int, float]]:
    """Of a tuning with eight configs: how many replays waited for the device, and how long it rested, before each timed replay."""
    device = Device()
    vars(tuning)["device_clock"] = lambda: device
    kernel, x = autotuned(blocks=(1, 2, 4, 8, 16, 32, 64, 128)), torch.arange(64.0)

    @contextual_autotune(is_dist=False, cache=False)
    def step() -> Any:
        return launch(kernel, x)

    step()
    return device.rests_s


def test_the_device_rests_and_the_host_is_few_replays_ahead():
    """At its power limit a device throttles, and a candidate would pay for those before it; what a rest takes follows from replays done."""
    (found,) = values(on_ranks(1, leads, is_dist=False))
    assert len(found) > 20
    assert max(n_waiting for n_waiting, _ in found) == 4
    assert 0.99 * LAUNCH_S <= min(rest_s for _, rest_s in found[5:]) < 3 * LAUNCH_S  # on a slow host it is longer


def n_clocks(rank: int) -> dict[bool, set[int]]:
    """Clocks begun in replays of a race, by whether the replay times a candidate; two sites, of which one is through before the other."""
    kernels = [autotuned(blocks=blocks) for blocks in ((16, 32), (16, 32, 64, 128, 256, 512))]
    begun: list[Span] = []
    in_replays: dict[bool, set[int]] = {True: set(), False: set()}
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

    Span.begin, Replayer.run = counted_begin, counted_run  # type: ignore[method-assign]
    x = torch.arange(64.0)

    @contextual_autotune(is_dist=False, cache=False)
    def step() -> list[torch.Tensor]:
        return [launch(kernel, x) for kernel in kernels]

    step()
    Span.begin, Replayer.run = begin, run  # type: ignore[method-assign]
    return in_replays


def test_each_timed_replay_has_as_many_clocks_in_it():
    """Two events take some microseconds of the device. A site that is through runs untimed, and its replays must not look faster."""
    assert values(on_ranks(1, n_clocks, is_dist=False)) == [{True: {3}, False: {1}}]
