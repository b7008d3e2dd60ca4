"""Clocks: the time of a launch and of a whole replay.

Knows devices and nothing of ranks or sites, and of Triton only whether it interprets. A span is begun and ended inside a
replay without waiting; it is read at the meeting, when the device has gone past it. Times are milliseconds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import torch
import triton

MAX_LEAD_MS = 10.0
"""Longest time the device is kept busy before a run of which it is not known that the host can be ahead."""


class WallSpan:
    """Host time; right where a launch returns only when it is done, as under the interpreter."""

    __slots__ = ("_begin", "_end")
    now: ClassVar[Callable[[], float]] = staticmethod(lambda: time.perf_counter())
    """Seconds of the clock that is read."""

    def __init__(self) -> None:
        self._begin = self._end = 0.0

    def begin(self) -> None:
        """Start the host's clock."""
        self._begin = WallSpan.now()

    def end(self) -> None:
        """Stop the host's clock."""
        self._end = WallSpan.now()

    def has_begun(self) -> bool:
        """Host work has begun when it was called."""
        return True

    def is_done(self) -> bool:
        """Host work is done when it has returned."""
        return True

    def ms(self) -> float:
        """Milliseconds of host time."""
        return (self._end - self._begin) * 1e3


class CudaSpan:
    """A pair of CUDA events on the stream that is current when each is recorded."""

    __slots__ = ("_begin", "_end")

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """Record the first event, in the order of the device's queue."""
        self._begin.record()

    def end(self) -> None:
        """Record the second event."""
        self._end.record()

    def has_begun(self) -> bool:
        """True if the device has passed the first event."""
        return bool(self._begin.query())

    def is_done(self) -> bool:
        """True if the device has passed the second event. Raises the device's error when its context is dead."""
        return bool(self._end.query())

    def ms(self) -> float:
        """Milliseconds of device time between the two events. Call only when done."""
        return float(self._begin.elapsed_time(self._end))


Span = WallSpan | CudaSpan
"""One measured stretch of work."""


class WallClock:
    """Clock of a machine without a GPU."""

    def span(self) -> Span:
        """A span of host time, not yet begun."""
        return WallSpan()

    def prepare(self, lead_ms: float, *, is_cold: bool = True) -> None:
        """Nothing: the host is the device."""


class CudaClock:
    """Clock of the current CUDA device."""

    def __init__(self) -> None:
        self._cycles_per_ms = 2e6  # at least as long as asked on any clock up to 2 GHz

    def span(self) -> Span:
        """A span of device time, not yet begun."""
        return CudaSpan()

    def prepare(self, lead_ms: float, *, is_cold: bool = True) -> None:
        """Flush the L2 cache, then spin on the device for ``lead_ms``, so that launch gaps are not timed."""
        if is_cold:
            n_bytes = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            # Writing twice the L2 evicts the data that the last replay left there. Freed at once: the replay may need the memory.
            with suppress(torch.OutOfMemoryError):
                torch.empty(n_bytes, dtype=torch.uint8, device="cuda").zero_()
        if lead_ms:
            torch.cuda._sleep(int(lead_ms * self._cycles_per_ms))


Clock = WallClock | CudaClock
"""A source of spans for one kind of device."""


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the garbage collector off the objects that are there, while new ones are collected as ever.

    A collection of all that torch and Triton have imported takes 0.2 s on the host, in the middle of a replay or of a wait for it. What
    is garbage already is collected afterwards.
    """
    if not gc.isenabled() or gc.get_freeze_count():  # the user's own arrangement
        yield
        return
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def is_interpreted() -> bool:
    """True if kernels run under Triton's interpreter, on the host, also on a machine with a GPU."""
    return bool(triton.knobs.runtime.interpret)


def device_clock() -> Clock:
    """The clock of the device that runs the kernels: CUDA events on a GPU, wall time on the host."""
    return CudaClock() if torch.cuda.is_available() and not is_interpreted() else WallClock()


def wait_for_device() -> None:
    """Until the current CUDA device, if there is one, has done all that was queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def is_capturing() -> bool:
    """True while the current stream records a CUDA graph."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except (RuntimeError, AssertionError):  # torch without CUDA, or no driver: nothing can be capturing
        return False
