"""Stopwatches: how long a launch and a whole replay take.

Knows devices and nothing of ranks or sites, and of Triton only whether it interprets. A span is begun and ended inside a
replay without waiting for anything; it is read at the meeting, when the device has gone past it. Times are milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Protocol

import torch
import triton

MAX_LEAD_MS = 10.0
"""Longest time the device is kept busy before a replay; a closure that waits for its GPU cannot be outrun anyway."""


class Span(Protocol):
    """One measured stretch of work."""

    def begin(self) -> None:
        """Start here, in the order of the device's queue."""

    def end(self) -> None:
        """Stop here, in the order of the device's queue."""

    def is_done(self) -> bool:
        """Whether the device has gone past the end. Raises what the device raises when its context is dead."""

    def ms(self) -> float:
        """Milliseconds between begin and end. Call only when done."""


class Clock(Protocol):
    """A source of spans for one kind of device."""

    def span(self) -> Span:
        """A new span, not yet begun."""

    def prepare(self, host_ms: float, *, is_cold: bool = True) -> None:
        """Before a replay: cold caches if asked for, and the device busy while the host queues work for about ``host_ms``."""


class WallSpan:
    """Host time; right where a launch returns only when it is done, as under the interpreter."""

    __slots__ = ("_begin", "_end")

    def __init__(self) -> None:
        self._begin = self._end = 0.0

    def begin(self) -> None:
        """Start the host's clock."""
        self._begin = time.perf_counter()

    def end(self) -> None:
        """Stop the host's clock."""
        self._end = time.perf_counter()

    def is_done(self) -> bool:
        """Host work is done when it has returned."""
        return True

    def ms(self) -> float:
        """Milliseconds of host time."""
        return (self._end - self._begin) * 1e3


class WallClock:
    """Clock of a machine without a GPU."""

    def span(self) -> WallSpan:
        """A span of host time."""
        return WallSpan()

    def prepare(self, host_ms: float, *, is_cold: bool = True) -> None:
        """Nothing: the host is the device."""


class CudaSpan:
    """A pair of CUDA events on the stream that is current when each is recorded."""

    __slots__ = ("_begin", "_end")

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """Record the first event."""
        self._begin.record()

    def end(self) -> None:
        """Record the second event."""
        self._end.record()

    def is_done(self) -> bool:
        """Whether the device has passed the second event."""
        return bool(self._end.query())

    def ms(self) -> float:
        """Milliseconds of device time between the two events."""
        return float(self._begin.elapsed_time(self._end))


class CudaClock:
    """Clock of the current CUDA device. Holds a buffer of twice its L2 cache from the first timed replay on."""

    def __init__(self) -> None:
        self._cycles_per_ms = 2e6  # at least as long as asked on any clock up to 2 GHz
        self._flush: torch.Tensor | None = None

    def span(self) -> CudaSpan:
        """A span of device time."""
        return CudaSpan()

    def prepare(self, host_ms: float, *, is_cold: bool = True) -> None:
        """Flush the L2 cache, then spin on the device for ``host_ms``, so that launch gaps are not timed."""
        if is_cold:
            if self._flush is None:
                n_bytes = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
                # Writing twice the L2 evicts what the last replay left there.
                self._flush = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
            self._flush.zero_()
        if host_ms:
            torch.cuda._sleep(int(min(host_ms, MAX_LEAD_MS) * self._cycles_per_ms))


def is_interpreted() -> bool:
    """True if kernels run under Triton's interpreter, on the host, also on a machine with a GPU."""
    return bool(triton.knobs.runtime.interpret)


def device_clock(is_interpreted: bool) -> Clock:
    """The clock of what runs the kernels: CUDA events where a GPU does, wall time where the host does."""
    return CudaClock() if torch.cuda.is_available() and not is_interpreted else WallClock()


def wait_for_device() -> None:
    """Until the current CUDA device, if there is one, has done all that was queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def is_capturing() -> bool:
    """Whether the current stream is recording a CUDA graph."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except (RuntimeError, AssertionError):  # torch without CUDA, or no driver: nothing can be capturing
        return False


def median(samples: Sequence[float]) -> float:
    """Middle sample, the lower one of two: one hiccup does not move it, and hiccups only ever add time."""
    return statistics.median_low(samples)


def without_outliers(samples: Sequence[float], max_share: float = 0.5) -> Sequence[float]:
    """The samples within 5 x the median absolute deviation (MAD) of their median, or within 0.5 %: equal samples have a MAD of 0.

    All samples, where fewer than five, or where more than ``max_share`` of them are further away: these are a second mode of what is
    measured and no accidents, and a mean without them would be too low. A median does not mind; at most half are ever further away.
    """
    if len(samples) < 5:
        return samples
    middle, mad = statistics.median(samples), spread(samples)
    staying = [sample for sample in samples if abs(sample - middle) <= max(5 * mad, 0.005 * abs(middle))]
    return staying if len(samples) - len(staying) <= max_share * len(samples) else samples


def spread(samples: Sequence[float]) -> float:
    """Median absolute deviation (MAD), in the samples' unit: how far a repeat is likely to be off."""
    middle = statistics.median(samples)
    return statistics.median([abs(sample - middle) for sample in samples])
