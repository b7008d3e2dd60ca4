"""The watching thread's loop, on a clock that the test moves."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune.distributed import Asked
from dist_tune.distributed.calls import Place
from dist_tune.distributed.meetings import Meetings
from dist_tune.distributed.presence import Doing
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

    activity = SimpleNamespace(absent=(), doing=Doing("", 0.0))
    ranks: Any = SimpleNamespace(rank=0, asked=asked, activity=activity, gather_s=60.0, is_alone=True, look=lambda tell: None)
    settings: Any = SimpleNamespace(deadline_s=DEADLINE_S)
    monkeypatch.setattr("dist_tune.watch.watchdog.LastWords", lambda *args: SimpleNamespace(tell=tell, leave=leave))
    anything: Any = SimpleNamespace(warning=None)
    watchdog = Watchdog(ranks, anything, settings, anything, ())  # type: ignore[arg-type]
    monkeypatch.setattr(watchdog, "_arm", lambda: None)
    watchdog.watch()
    monkeypatch.setattr(watchdog, "_over", SimpleNamespace(wait=wait, is_set=lambda: False))
    with pytest.raises(_Left, match="the c10d store has not answered for"):
        watchdog._run()
    assert 1.5 * DEADLINE_S <= now[0] - stopped_s <= 1.5 * DEADLINE_S + 0.8


@pytest.mark.parametrize(("begins", "told"), [(0.3, "replay 3"), (9.9, "its first run")])
def test_a_process_that_did_not_run_says_in_what(begins: float, told: str, monkeypatch: pytest.MonkeyPatch):
    """In what began between two looks, before it was stopped, and not in what began after it went on."""
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ranks = Meetings(None, 0, (0, 1), DEADLINE_S)
    ranks.is_alone = False  # type: ignore[attr-defined]  # of the group
    ranks.activity.begin(Place("f", 1))
    settings: Any = SimpleNamespace(deadline_s=DEADLINE_S, log_dir=Path())
    log: Any = SimpleNamespace(warning=lines.append)
    anything: Any = SimpleNamespace()
    watchdog = Watchdog(ranks, anything, settings, log, ())  # type: ignore[arg-type]

    def wait(seconds: float) -> None:
        now[0] = begins
        ranks.activity.at("replay 3")
        now[0] = 10.0

    monkeypatch.setattr(watchdog, "_over", SimpleNamespace(wait=wait, is_set=lambda: False))
    watchdog._pause(0.5)
    assert lines == [f"rank 0 did not run for 9.5 s in {told}: stopped, swapped out, or Python's lock held"]
