"""One tuning at a time in a process: tunings share devices, Triton's compiler and the meetings of a group.

Knows threads and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from dist_tune.errors import NestedTuningError

_lock = threading.Lock()
_tuning_thread: int | None = None


@contextmanager
def one_at_a_time(name: str, patience_s: float) -> Iterator[None]:
    """Wait until no other thread tunes, and keep others from it meanwhile.

    Raises:
        NestedTuningError: another thread has not ended within ``patience_s``, or this thread tunes already.
    """
    global _tuning_thread
    wait_s = 0.0 if _tuning_thread == get_ident() else patience_s
    if not _lock.acquire(timeout=wait_s):
        raise NestedTuningError(
            f"{name} waited {wait_s:g} s for another tuning of this process to end. One process tunes one closure at a time: "
            f"call closures once from one thread before using them in several, and do not call them from reset=."
        )
    _tuning_thread = get_ident()
    try:
        yield
    finally:
        _tuning_thread = None
        _lock.release()
