"""One tuning at a time in a process: tunings share devices, Triton's compiler and the meetings of a
group.

Knows threads and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from dist_tune.errors import NestedTuningError

_lock = threading.Lock()
_tuning_thread: int | None = None
_n_steps = 0
"""Replays, compilations and ends of tunings so far, by which waiting threads see progress."""


def mark_progress() -> None:
    """Called by a tuning between its replays: threads that wait for it go on waiting."""
    global _n_steps
    _n_steps += 1


@contextmanager
def one_at_a_time(name: str, patience_s: float) -> Iterator[None]:
    """Wait until no other thread tunes, and keep others from it meanwhile.

    Raises:
        NestedTuningError: another thread's tuning has made no progress for ``patience_s``, or this
            thread tunes already.
    """
    global _tuning_thread
    wait_s = 0.0 if _tuning_thread == get_ident() else patience_s
    if not _acquired(_lock, wait_s):
        raise NestedTuningError(
            f"{name} waited {wait_s:g} s for another tuning of this process, which made no"
            " progress. One process tunes one closure at a time: call closures once from one"
            " thread before using them in several, and do not call them from reset=."
        )
    _tuning_thread = get_ident()
    try:
        yield
    finally:
        _tuning_thread = None
        mark_progress()
        _lock.release()


@contextmanager
def in_turn(lock: Any, patience_s: float) -> Iterator[None]:
    """Wait for a closure's lock; go on without it where the other thread makes no progress, because
    it may be waiting for this one.
    """
    is_mine = _acquired(lock, patience_s)
    try:
        yield
    finally:
        if is_mine:
            lock.release()


def _acquired(lock: Any, patience_s: float) -> bool:
    """Acquire a lock, for as long as tunings of this process make progress."""
    seen = -1
    while not lock.acquire(timeout=patience_s):
        if seen == _n_steps or patience_s == 0.0:
            return False
        seen = _n_steps
    return True
