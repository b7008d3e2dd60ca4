"""``make=``: frees a rank that waits in a replay, so that the call goes on with process groups and a closure that are made anew.

Process groups are aborted, and the tuning's thread is interrupted by a signal whose handler raises. That ends Python code and system calls
such as a sleep, and no kernel and no call into a library; those are left as without ``make=``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident, main_thread
from typing import Any

from dist_tune.distributed import Ranks, abort_groups, regroup_of

Make = Callable[[], "Callable[..., Any] | tuple[Callable[..., Any], Any]"]
"""The user's factory: the function anew, or function and process group."""


class Freed(BaseException):
    """Ends a replay from another thread; not an Exception, so that no ``except Exception`` of the closure's catches it."""


class Rescue:
    """Frees the main thread of this process from a replay, once in a tuning."""

    def __init__(self, ranks: Ranks, *, is_wanted: bool) -> None:
        self._is_inside = False
        """True while the closure runs in a replay: only there the signal raises."""
        self._ranks = ranks
        self._is_wanted = is_wanted
        self._is_freeing = False
        self._number = 0
        self._lock = Lock()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The signal is handled meanwhile: the last of the real-time signals that the program leaves alone."""
        # Python runs handlers in the main thread, and lets no other thread set them.
        if not self._is_wanted or get_ident() != main_thread().ident:
            yield
            return
        numbers = range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1)
        self._number = next((each for each in numbers if signal.getsignal(each) is signal.SIG_DFL), 0)
        if not self._number:
            yield
            return
        signal.signal(self._number, self._handle)
        try:
            yield
        finally:
            with self._lock:  # a signal that comes later would end the process
                signal.signal(self._number, signal.SIG_DFL)
                self._number = 0

    def call(self, closure: Callable[[], Any]) -> Any:
        """Run the closure in a replay; raises ``Freed`` if it was ended."""
        try:
            self._is_inside = True
            return closure()
        finally:
            self._is_inside = False

    @property
    def is_ready(self) -> bool:
        """True if this rank can be freed."""
        return self._number != 0

    def free(self) -> None:
        """End the replay under way. For the watching thread; an abort may wait for the device."""
        abort_groups()
        with self._lock:
            if self.is_ready:
                self._is_freeing = True
                signal.pthread_kill(main_thread().ident or 0, self._number)

    def refuse(self) -> None:
        """Tell peers that this rank ends, and makes no groups anew."""
        if self._is_wanted and (regroup := regroup_of(self._ranks)) is not None:
            regroup.refuse(f"rank {self._ranks.rank} leaves, because nothing in its process ends what it waits for")

    def _handle(self, number: int, frame: object) -> None:
        if self._is_inside and self._is_freeing:
            self._is_freeing = False
            raise Freed
