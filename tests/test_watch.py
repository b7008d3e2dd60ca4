"""The watching thread's loop, on a clock that the test moves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune.distributed import Asked
from dist_tune.watch import Watchdog

DEADLINE_S = 4.0


class _Left(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize(("tells_for_s", "stopped_s"), [(0.0, 0.0), (1.9, 0.0), (0.0, 3.0)])
def test_a_silent_store_ends_the_process_after_one_and_a_half_deadlines(
    tells_for_s: float, stopped_s: float, monkeypatch: pytest.MonkeyPatch
):
    """However long the message takes, which asks that very store; time in which the process was stopped does not count, and is told."""
    now, told = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds + (stopped_s if now[0] == 0.0 else 0.0)

    def tell(subject: Any, late_s: float) -> None:
        now[0] += tells_for_s

    def leave(subject: Any, late_s: float) -> None:
        raise _Left(watchdog._text(subject, late_s))

    activity = SimpleNamespace(absent=(), late="")
    asked = Asked("get", 0.0)
    ranks: Any = SimpleNamespace(rank=0, asked=asked, activity=activity, gather_s=60.0, is_alone=False, look=lambda tell: None)
    settings: Any = SimpleNamespace(deadline_s=DEADLINE_S)
    log: Any = SimpleNamespace(warning=told.append, late=lambda text: None)
    watchdog = Watchdog(ranks, log, settings, log, None)
    for name, value in {
        "_arm": lambda: None,
        "_tell": tell,
        "_leave": leave,
        "_over": SimpleNamespace(wait=wait, is_set=lambda: False),
    }.items():
        monkeypatch.setattr(watchdog, name, value)
    watchdog.watch()
    with pytest.raises(_Left, match="the c10d store has not answered for"):
        watchdog._run()
    assert 1.5 * DEADLINE_S <= now[0] - stopped_s <= 1.5 * DEADLINE_S + 0.8
    assert told == ["rank 0 did not run for 3.0 s: stopped, swapped out, or Python's lock held"] * (stopped_s > 0)
