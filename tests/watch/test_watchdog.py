"""The watching thread's loop, on a clock that the test moves."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune.distributed import Asked
from dist_tune.distributed.liveness.heartbeat import Heartbeat
from dist_tune.watch.watchdog import Watchdog

DEADLINE_S = 4.0


class _Left(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize(("tells_for_s", "stopped_s"), [(0.0, 0.0), (1.9, 0.0), (0.0, 3.0)])
def test_a_silent_store_ends_the_process_after_one_and_a_half_deadlines(
    tells_for_s: float, stopped_s: float, monkeypatch: pytest.MonkeyPatch
):
    """However long the message takes, which asks that very store; time in which the process was stopped does not count."""
    now, asked = [0.0], Asked("get", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds + (stopped_s if now[0] == 0.0 else 0.0)

    def tell(what: str, then: str) -> None:
        now[0] += tells_for_s

    def leave(what: str, advice: str) -> None:
        raise _Left(what)

    ranks: Any = SimpleNamespace(rank=0, asked=asked, unanswered_since=None, absent=(), gather_s=60.0)
    settings: Any = SimpleNamespace(deadline_s=DEADLINE_S)
    monkeypatch.setattr("dist_tune.watch.watchdog.LastWords", lambda *args: SimpleNamespace(tell=tell, leave=leave))
    anything: Any = SimpleNamespace()
    watchdog = Watchdog(ranks, anything, settings, anything, ())  # type: ignore[arg-type]
    monkeypatch.setattr(watchdog, "_arm", lambda: None)
    monkeypatch.setattr(watchdog, "_over", SimpleNamespace(wait=wait, is_set=lambda: False))
    with pytest.raises(_Left, match="the c10d store has not answered for"):
        watchdog._watch()
    assert 1.5 * DEADLINE_S <= now[0] - stopped_s <= 1.5 * DEADLINE_S + 0.4


def _watchdog(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    settings: Any = SimpleNamespace(deadline_s=DEADLINE_S)
    anything: Any = SimpleNamespace(asked=None)
    monkeypatch.setattr("dist_tune.watch.watchdog.LastWords", lambda *args: anything)
    return Watchdog(anything, anything, settings, anything, ())  # type: ignore[arg-type]


@pytest.mark.parametrize("has_thread", [True, False], ids=["in a silent call", "no more threads"])
def test_a_meeting_is_watched_where_the_beating_thread_does_not_come_back(has_thread: bool, monkeypatch: pytest.MonkeyPatch):
    """A first run longer than a beat, in which the store went silent: the beating thread stands in a call, and starts no watch later."""
    is_asked, is_over = threading.Event(), threading.Event()

    def ask(key: str, value: str) -> None:
        is_asked.set()
        is_over.wait(60)

    store: Any = SimpleNamespace(clone=lambda: SimpleNamespace(set=ask))
    beating = Heartbeat(0, (0, 1), lambda: 0)
    beating._every_s = 1e-3
    watchdog, started = _watchdog(monkeypatch), list[str]()
    watchdog._ranks = beating  # type: ignore[assignment]
    monkeypatch.setattr(watchdog, "start_thread", lambda: started.extend(["watchdog"] * bool(watchdog._watched)))
    if not has_thread:
        monkeypatch.setattr(threading.Thread, "start", _no_more_threads)
    with beating.beating(lambda: store, lambda line: None, watchdog.start_thread):
        assert is_asked.wait(10 * has_thread) == has_thread
        watchdog.start(is_late=True)
        assert started == ["watchdog"]
        is_over.set()


def test_a_meeting_before_the_first_beat_is_watched_from_that_beat_on(monkeypatch: pytest.MonkeyPatch):
    """A hit starts no thread of its own."""
    beating = Heartbeat(0, (0, 1), lambda: 0)
    beating._every_s = 60.0
    watchdog, started = _watchdog(monkeypatch), list[str]()
    watchdog._ranks = beating  # type: ignore[assignment]
    monkeypatch.setattr(watchdog, "start_thread", lambda: started.append("watchdog"))
    store: Any = SimpleNamespace()
    with beating.beating(lambda: store, lambda line: None, watchdog.start_thread):
        watchdog.start(is_late=True)
        assert not started
        beating._begin_watches()
    assert started == ["watchdog"]


def _no_more_threads(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
