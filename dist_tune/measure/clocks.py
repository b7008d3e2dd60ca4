"""Clocks: the time of a launch and of a whole replay, and the lead of the host before it.

Knows devices and nothing of ranks or sites, and of Triton only whether it interprets. A span is
begun and ended inside a replay without waiting; it is read at the meeting, when the device has gone
past it. Times are milliseconds.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
import triton
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dist_tune.accelerator import api, device_type, flush_cache, kind, spin
from dist_tune.measure.memory import tensors_in

MAX_LEAD_MS = 10.0
"""Longest time the device is kept busy before a run of which it is not known that the host can be
ahead; its longest rest, too.
"""
LONGEST_MS = 100.0
"""Longest lead of a step that does not wait for its device: its host may be far slower, as where
Python launches many small kernels.
"""
COVER_MS = 0.1
"""Spin before a launch on an idle stream: a launch with its two events takes the host 30 to 60 us.
"""
MAX_COVER_MS = 0.8
_N_TRIES, _TRY_MS = 20, 0.3
_MARGIN_MS = 3.0
"""Longest margin over the host's time.

A collective that waits for its turn for tens of milliseconds wakes up to 0.2 ms late (H200).
"""
_N_MISSES = 4
"""Replays in a row without a lead that was enough, after which the step is taken for one that waits
for its device.
"""
_RETRY_AFTER = 16
"""Replays after which such a step has one long lead again: its host may have been busy with
something else.
"""
_GROWTH = 1.1
"""A full launch queue blocks the host, so one long replay says little; where the host was ahead its
time grows by a tenth at most.
"""
_DECAY = 0.8
_TRACERS = frozenset({"FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode"})
"""By name, since to import them takes a second."""
_WITHOUT_DATA = frozenset({"FakeTensor", "FunctionalTensor"})


class Clock:
    """A source of spans: of the current GPU, or of the host, which is right where a launch returns
    only when it is done.
    """

    now: ClassVar[Callable[[], float]] = staticmethod(lambda: time.perf_counter())
    """Seconds of the host's clock that is read."""

    def __init__(self, *, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self._spins = is_cuda and kind() == "cuda"
        """False on other GPUs, whose times are as they are."""
        self._spare = defaultdict[int, list[Span]](list)
        """By device."""
        self._cover_ms = COVER_MS
        self._covered_until_s = 0.0

    def span(self, *, is_covered: bool = False) -> Span:
        """A span of work, not yet begun.

        ``is_covered``: of a launch whose device would wait for the host: it spins from the begin on
        until the launch is queued. An idle stream reads 40 us for a kernel of 2.3 us, and 4.2 us
        behind a spin of 100 us (one H200).
        """
        device = current_device() if self._spins else 0
        try:
            span = self._spare[device].pop()
        except IndexError:
            span = Span(self.event(), self.event(), device)
        span.cover = self._spin if is_covered else None
        return span

    def event(self) -> Any:
        """A point in the device's queue, once it is recorded."""
        return DeviceEvent() if self.is_cuda else _HostEvent()

    def launch_ms(self, span: Span) -> float:
        """Milliseconds of the one launch in a span, which is not to be used any more: without what
        the events take.
        """
        ms = span.ms()
        self._spare[span.device].append(span)
        return max(ms - events_ms(span.device), 0.1 * ms) if self._spins else ms

    def _spin(self) -> None:
        if self._spins and time.perf_counter() > self._covered_until_s:
            spin(self._cover_ms)
            self._covered_until_s = time.perf_counter() + 0.5e-3 * self._cover_ms

    def has_gap(self, span: Span) -> bool:
        """True of a launch just queued if the device may have waited for it after the span's begin.

        Where it was to spin meanwhile, it spins for longer from then on.
        """
        if not self._spins or not span.has_begun():
            return False
        if span.cover is not None:
            self._cover_ms = min(2 * self._cover_ms, MAX_COVER_MS)
        return True

    def prepare(self, lead_ms: float, *, is_cold: bool = True) -> None:
        """Flush the L2 cache, then spin on the device for ``lead_ms``, so that launch gaps are not
        timed. Nothing on the host.
        """
        if not self.is_cuda:
            return
        if is_cold:
            flush_cache()
        if lead_ms:
            spin(lead_ms)


class DeviceEvent:
    """An event on the current stream. torch's own ``record`` takes 6.5 us of the host to find the
    stream, with it 1.9.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = api.Event(enable_timing=True)

    def record(self) -> None:
        """After what the stream has so far."""
        self._event.record(_current_stream())

    def query(self) -> Any:
        """True once the stream has come to it."""
        return self._event.query()

    def elapsed_time(self, end: DeviceEvent) -> Any:
        """Milliseconds from this event to another one."""
        return self._event.elapsed_time(end._event)


_streams: dict[tuple[int, int], Any] = {}
"""Device, and the handle of a stream -> the stream."""


def current_device() -> int:
    """The index of the device; 0 of a torch without CUDA."""
    return int(getattr(torch._C, "_cuda_getDevice", int)())


def _current_stream() -> Any:
    try:
        key = (device := current_device()), torch._C._cuda_getCurrentRawStream(device)
    except AttributeError:  # a torch for other devices
        return api.current_stream()
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = api.current_stream()
    return stream


@cache
def events_ms(device: int) -> float:
    """What two events around a launch read beyond its time: about 3 us, by tiny kernels on a stream
    of their own.
    """
    stream, x = api.Stream(device), torch.zeros(1, device=torch.device(device_type(), device))

    def least_ms(n_launches: int) -> float:
        found = []
        for _ in range(_N_TRIES):
            begin, end = api.Event(enable_timing=True), api.Event(enable_timing=True)
            spin(_TRY_MS)
            begin.record(stream)
            for _ in range(n_launches):
                x.zero_()
            end.record(stream)
            stream.synchronize()
            found.append(float(begin.elapsed_time(end)))
        return min(found)

    with api.device(device), api.stream(stream):
        least_ms(1)
        one_ms, nine_ms = least_ms(1), least_ms(9)
    return max(0.0, one_ms - (nine_ms - one_ms) / 8)


class _HostEvent:
    """A CUDA event of a device that is the host: what was recorded has passed."""

    def record(self) -> None:
        self.at_s = Clock.now()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end.at_s - self.at_s) * 1e3


class Span:
    """One measured stretch of work, between two events on the stream that is current when each is
    recorded.
    """

    __slots__ = ("_begin", "_end", "cover", "device")

    def __init__(self, begin: Any, end: Any, device: int = 0) -> None:
        self._begin, self._end, self.device = begin, end, device
        self.cover: Callable[[], None] | None = None
        """What lets the device spin: after the hooks of a launch, which are the host's."""

    def begin(self) -> None:
        """Record the first event, in the order of the device's queue."""
        if self.cover is not None:
            self.cover()
        self._begin.record()

    def end(self) -> None:
        """Record the second event."""
        self._end.record()

    def has_begun(self) -> bool:
        """True if the device has passed the first event."""
        return bool(self._begin.query())

    def is_done(self) -> bool:
        """True if the device has passed the second event.

        Raises the device's error when its context is dead.
        """
        return bool(self._end.query())

    def ms(self) -> float:
        """Milliseconds between the two events. Call only when done."""
        return float(self._begin.elapsed_time(self._end))


_NEVER = 1 << 30
"""Collections of the middle generation before one of the oldest."""


class Lead:
    """The host's time of a replay, and from it the lead. Milliseconds.

    The first lead is as long as one may be that is of no use: a step whose host is quicker shows
    its time in it. A step that waits for its device is never ahead of it, and has no long leads.
    The device rests in each lead for the time of the shortest replay: at its power limit it
    throttles after some 40 ms of work, a candidate pays for those before it, and differences of 4 %
    are gone (H200).
    """

    def __init__(self) -> None:
        self._host_ms = MAX_LEAD_MS - _MARGIN_MS
        self._n_missed = 0
        self._is_known = False

    def ms(self, shortest_ms: float = 0.0, n_queued: int = 0) -> float:
        """Milliseconds that the device spins before the next replay: until the host has queued it,
        and to rest.

        ``shortest_ms``: the shortest replay so far; 0: not known. ``n_queued``: replays that the
        device has yet to begin keep it busy as well; their leads are not counted, so that the host
        gets farther ahead.
        """
        may_be_long = self._n_missed < _N_MISSES or self._n_missed % _RETRY_AFTER == 0
        most_ms = LONGEST_MS if may_be_long else MAX_LEAD_MS
        lead_ms = (
            min(self._host_ms + min(0.5 * self._host_ms, _MARGIN_MS), most_ms)
            - n_queued * shortest_ms
        )
        return max(lead_ms, min(shortest_ms, MAX_LEAD_MS))

    def add(self, host_ms: float, *, is_ahead: bool) -> None:
        """Take in how long the host took to queue a replay; ``is_ahead``: the device had not begun
        it by then.
        """
        self._n_missed = 0 if is_ahead else self._n_missed + 1
        if is_ahead and self._is_known:  # one quick replay is no quick host
            host_ms = max(host_ms, _DECAY * self._host_ms)
        self._host_ms = min(host_ms, (_GROWTH if is_ahead else 3.0) * self._host_ms)
        self._is_known |= is_ahead


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Keep the garbage collector off the oldest objects, while younger ones are collected as ever.

    A collection of all that torch and Triton have imported takes 0.3 s on the host, in the middle
    of a replay or of a wait for it. The threshold is raised, and nothing frozen: what is thawed
    counts as new, and costs two such collections after each tuning.
    """
    young, middle, old = gc.get_threshold()
    raised = max(old, _NEVER)
    gc.set_threshold(young, middle, raised)
    try:
        yield
    finally:
        # Of the younger ones the program may have set its own meanwhile.
        young, middle, now = gc.get_threshold()
        if now == raised:
            gc.set_threshold(young, middle, old)


def is_interpreted() -> bool:
    """True if kernels run under Triton's interpreter, on the host, also on a machine with a GPU."""
    return bool(triton.knobs.runtime.interpret)


def device_clock() -> Clock:
    """The clock of the device that runs the kernels: events on a GPU, wall time on the host."""
    return Clock(is_cuda=api.is_available() and not is_interpreted())


def wait_for_device() -> None:
    """Until the current GPU, if there is one, has done all that was queued."""
    if api.is_available():
        api.synchronize()


def is_capturing() -> bool:
    """True while the current stream records a graph."""
    try:
        return bool(api.is_current_stream_capturing())
    except (RuntimeError, AssertionError, AttributeError):
        # No GPU, no driver, or a torch without graphs of XPU: nothing can be capturing.
        return False


def is_traced(arguments: Any) -> bool:
    """True if a call with these arguments computes no values: its times mean nothing, and its
    results cannot be checked.
    """
    if torch.compiler.is_compiling() or any(
        _has_base(mode, _TRACERS) for mode in _get_current_dispatch_mode_stack()
    ):
        return True
    return any(
        each.is_meta or _has_base(each, _WITHOUT_DATA) or torch._is_functional_tensor(each)
        for each in tensors_in(arguments).values()
    )


def _has_base(value: object, names: frozenset[str]) -> bool:
    return any(base.__name__ in names for base in type(value).__mro__)
