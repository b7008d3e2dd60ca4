"""Being ended from outside, in a way that can be written down. Knows signals and nothing else of dist_tune."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raising_on_termination() -> Iterator[None]:
    """Meanwhile SIGTERM, by which launchers and schedulers stop a process, raises ``SystemExit``.

    What was under way is then known to be no cause of that. A handler of the user's is left alone, and so are all threads but the main
    one.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
