"""The watching thread on a clock that the test moves: when it tells of what does not end, and when
it ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune import watch
from dist_tune.ranks import Asked
from dist_tune.watch import EXIT_CODE, Kind, Watchdog

DEADLINE_S = 4.0
LOOK_S = 0.8
"""Longest time between two looks, with those that a step takes to be seen."""


class Left(Exception):
    """In place of the end of the process."""


class Watched(SimpleNamespace):
    """A tuning, its watchdog and their clock."""

    now: float
    told: list[tuple[float, str]]
    dog: Watchdog
    ranks: Any
    runs: list[Callable[[], None]]

    def leaves_after(self) -> float:
        """Seconds from now on until the watching thread ends the process."""
        began = self.now
        self.dog.mind()
        self.dog.watch()
        with pytest.raises(Left, match=f"{EXIT_CODE}"):
            self.runs[0]()
        return self.now - began

    def replay(self, seconds: float) -> None:
        """One that ends."""
        self.dog.at("replay 1", Kind.REPLAY, {})
        self.now += seconds
        self.dog.end_replay()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Nothing waits; a pause of the watching thread moves the clock."""
    made = Watched(now=0.0, told=[], runs=[], lost_s=0.0, signs_s=0.0)

    class Over:
        def wait(self, seconds: float) -> None:
            made.now, made.lost_s = made.now + seconds + made.lost_s, 0.0

        def is_set(self) -> bool:
            return False

    def leave(code: int) -> None:
        raise Left(f"{code}")

    def last_signs() -> dict[int, str]:
        made.now += made.signs_s
        return {}

    def tell(text: str) -> None:
        made.told.append((made.now, text))

    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda *args, **how: None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **how: None)
    monkeypatch.setattr(watch, "Event", Over)
    monkeypatch.setattr(watch, "run_in_thread", lambda run, name: made.runs.append(run))
    monkeypatch.setattr(watch, "within", lambda seconds, call: call())
    monkeypatch.setattr(watch, "to_terminal", lambda text: None)
    activity = SimpleNamespace(absent=(), late="")
    made.ranks = SimpleNamespace(
        rank=0,
        asked=None,
        activity=activity,
        gather_s=60.0,
        is_alone=False,
        look=lambda tell: None,
        last_signs=last_signs,
        end_from_outside=lambda error: "",
    )
    log: Any = SimpleNamespace(
        warning=tell, error=tell, late=lambda text: None, path="the log", log_file=None
    )
    sites: Any = SimpleNamespace(met={})
    settings: Any = SimpleNamespace(deadline_s=DEADLINE_S)
    made.dog = Watchdog(made.ranks, sites, settings, log, None)
    return made


def asks_the_store(watched: Watched) -> None:
    watched.ranks.asked = Asked("get", 0.0)


def replays(watched: Watched) -> None:
    watched.dog.at("replay 1", Kind.REPLAY, {})


def replays_after_a_long_first_run(watched: Watched) -> None:
    watched.dog.first_run_s = 10.0
    replays(watched)


def replays_after_long_ones(watched: Watched) -> None:
    watched.dog.first_run_s = 100.0
    for seconds in (2.0, 1.5, 3.0):
        watched.replay(seconds)
    replays(watched)


def replays_after_short_ones(watched: Watched) -> None:
    watched.dog.first_run_s = 100.0
    watched.replay(0.01)
    replays(watched)


def works_between_replays(watched: Watched) -> None:
    watched.dog.at("work between replays")


def resets(watched: Watched) -> None:
    watched.dog.at("reset=", Kind.USERS_WORK)


@pytest.mark.parametrize(
    ("doing", "limit_s"),
    [
        (asks_the_store, DEADLINE_S),
        (replays, DEADLINE_S),
        (replays_after_a_long_first_run, 2 * 10.0),
        (replays_after_long_ones, 20 * 1.5),
        (replays_after_short_ones, DEADLINE_S),
        (works_between_replays, 1.5 * DEADLINE_S),
        (resets, 10 * DEADLINE_S),
    ],
)
def test_what_does_not_end_is_told_at_its_limit_and_ends_the_process_within_a_deadline(
    watched: Watched, doing: Callable[[Watched], None], limit_s: float
):
    """A rank outside of a launch leaves later than one inside: it may wait for that one."""
    doing(watched)
    began = watched.now
    after_s = watched.leaves_after()
    leave_s = limit_s + DEADLINE_S * (0.5 if watched.ranks.asked else 0.9)
    assert leave_s <= after_s <= leave_s + LOOK_S
    told_s = watched.told[0][0] - began
    assert limit_s <= told_s <= limit_s + LOOK_S


def test_a_launch_that_does_not_return_ends_the_process_after_one_and_a_half_deadlines(
    watched: Watched,
):
    """Whatever the step that it is in may take."""
    resets(watched)
    with watched.dog.launching("kernel", 1):
        after_s = watched.leaves_after()
    assert 1.5 * DEADLINE_S <= after_s <= 1.5 * DEADLINE_S + LOOK_S


def test_telling_counts_as_time(watched: Watched):
    """What is told asks the very store that does not answer."""
    asks_the_store(watched)
    watched.signs_s = 1.9
    after_s = watched.leaves_after()
    assert 1.5 * DEADLINE_S <= after_s <= 1.5 * DEADLINE_S + LOOK_S


def test_time_in_which_the_process_was_stopped_does_not_count_and_is_told(watched: Watched):
    asks_the_store(watched)
    watched.lost_s = 3.0
    after_s = watched.leaves_after() - 3.0
    assert 1.5 * DEADLINE_S <= after_s <= 1.5 * DEADLINE_S + LOOK_S
    assert (
        watched.told[0][1]
        == "rank 0 did not run for 3.0 s: stopped, swapped out, or Python's lock held"
    )


def test_the_first_run_may_take_any_time(watched: Watched):
    """A hundred deadlines; its launches may not."""

    class Ended(Exception):
        pass

    def look(tell: Callable[[str], None]) -> None:
        if watched.now > 100 * DEADLINE_S:
            raise Ended

    watched.ranks.look = look
    watched.dog.mind()
    watched.dog.watch()
    with pytest.raises(Ended):
        watched.runs[0]()
    assert watched.told == []
