"""Runs the closure: one replay, or a batch of timed ones with the host ahead of the device.

Knows the order of things around a replay: reset, alignment, listening, undoing. Nothing in here talks to other ranks while
the closure runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dist_tune import intercept
from dist_tune.errors import StuckDeviceError
from dist_tune.intercept import Listener
from dist_tune.plan import Replay
from dist_tune.ranks import Ranks
from dist_tune.sites import Sites
from dist_tune.timing import Clock, Span

_POLL_S = 1e-4


class Replayer:
    """The replays of one tuning."""

    def __init__(self, ranks: Ranks, sites: Sites, clock: Clock, reset: Callable[[], object] | None, stuck_after_s: float) -> None:
        self.n_replays = 1  # the caller made the first
        self._ranks = ranks
        self._sites = sites
        self._clock = clock
        self._reset = reset
        self._stuck_after_s = stuck_after_s
        self._host_ms = 1.0
        self._shortest_ms = 0.0

    def restart(self) -> None:
        """Call the user's ``reset``: before each replay but the first."""
        if self._reset is not None:
            self._reset()

    def run(self, closure: Callable[[], Any], listener: Listener, schedule: Replay, whole: Span | None = None) -> Any:
        """One replay; ``whole`` times it."""
        self._sites.begin_replay(self.n_replays, schedule)
        self.n_replays += 1
        intercept.push(listener)
        try:
            if whole is not None:
                whole.begin()
            value = closure()
            if whole is not None:
                whole.end()
            return value
        finally:
            intercept.pop()

    def run_batch(self, closure: Callable[[], Any], listener: Listener, batch: list[Replay], *, is_cold: bool = True) -> None:
        """Replay a batch, and write the times to the ledger when the device is through. ``is_cold``: flush the L2 before each.

        Raises:
            StuckDeviceError: the device stands still.
            DistTuneError: another rank ended the tuning.
        """
        wholes: list[tuple[int, Replay, Span]] = []
        for k, schedule in enumerate(batch):
            self._ranks.beat(f"replay {k} of a batch of {len(batch)}")
            self.restart()
            # A replay that the device has not come to yet keeps it busy as well as any spinning does.
            is_ahead = len(wholes) > 1 and self._shortest_ms > 1.5 * self._host_ms and not wholes[-2][2].is_done()
            self._clock.prepare(0.0 if is_ahead else 1.5 * self._host_ms, is_cold=is_cold)
            self._ranks.align()
            whole = self._clock.span()
            wholes.append((self.n_replays, schedule, whole))
            began = time.perf_counter()
            self.run(closure, listener, schedule, whole)
            # A full launch queue blocks the host, so one long call says little; it may grow by a tenth a replay.
            self._host_ms = min((time.perf_counter() - began) * 1e3, 1.1 * self._host_ms)
            self._sites.end_replay()
        self._await_device([span for _, _, span in wholes])
        for number, schedule, span in wholes:
            ms = span.ms()
            self._shortest_ms = min(ms, self._shortest_ms or ms)
            self._sites.ledger.add_replay(number, ms, schedule)
        self._sites.read_spans()

    def _await_device(self, spans: list[Span]) -> None:
        """Wait until the device has done all replays, and leave if another rank ends the tuning meanwhile."""
        n_done, since = 0, time.monotonic()
        while n_done < len(spans):
            if spans[n_done].is_done():
                n_done, since = n_done + 1, time.monotonic()
                continue
            self._ranks.beat(f"waiting for the device, {n_done} of {len(spans)} replays done")
            if time.monotonic() - since > self._stuck_after_s:
                raise StuckDeviceError(
                    f"rank {self._ranks.rank}: the device has not finished replay {n_done} of {len(spans)} within "
                    f"{self._stuck_after_s:g} s. A kernel spins or waits for a signal that does not come; restart the process."
                )
            time.sleep(_POLL_S)
