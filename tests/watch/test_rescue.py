"""The signal that frees the main thread."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from dist_tune.watch import Rescue


def test_no_signal_is_sent_once_its_handler_is_gone(monkeypatch: pytest.MonkeyPatch):
    """Its default action ends the process: a watchdog that frees a rank at the very end of a tuning does nothing."""
    ranks: Any = None
    rescue, sent, threads = Rescue(ranks, is_wanted=True), [], []
    own = signal.signal

    def set_handler(number: int, handler: Any) -> Any:
        before = own(number, handler)
        if handler is signal.SIG_DFL:
            threads.append(threading.Thread(target=rescue.free))
            threads[-1].start()
            threads[-1].join(0.05)
        return before

    monkeypatch.setattr(signal, "signal", set_handler)
    monkeypatch.setattr(signal, "pthread_kill", lambda ident, number: sent.append(number))
    with rescue.ready():
        assert rescue.is_ready
    threads[0].join()
    assert sent == []
