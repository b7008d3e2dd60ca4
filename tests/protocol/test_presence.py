"""What a rank notes of its runs, which peers it tells of as late (on a clock that the test moves),
and the state of their processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dist_tune.ranks.calls import Card, Place, State
from dist_tune.ranks.presence import CARD, Activity, Presence, process_name, state_of
from tests.protocol.in_memory import DEAD, World, until

PLACE = Place("step", 1)
HERE, ABSENT = "rank 1 is late in call 1 of step, 4 s", "rank 1 has not come to call 1 of step, 4 s"
"""On the terminal."""


def test_what_a_rank_did_last_goes_with_its_part(monkeypatch: pytest.MonkeyPatch):
    """Its latest run, since when, and the first candidate that failed between collectives."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity, said = Activity(0, [0, 1], lambda: 0, lambda: 0), list[str]()
    activity.begin(PLACE)
    for now[0], text in ((1.0, "replay 1"), (3.0, "replay 2")):
        said.append(activity.header("step", "report").last)
        activity.run(text)
    now[0], activity.troubles = 3.5, ["candidate 3", "candidate 4"]
    activity.at("the exchange 'report'")
    assert [*said, activity.header("step", "report").last] == [
        "its first run, begun 1.0 s before",
        "replay 1, begun 2.0 s before",
        "replay 2, begun 0.5 s before, having left candidate 3, between two of its collectives",
    ]


@pytest.mark.parametrize(
    ("card", "told", "shown"),
    [
        (
            Card(0, n_of_process=1, inside=[PLACE], doing="x"),
            "after 1 collectives of its process where rank 0 is in number 2",
            f"{HERE}: x",
        ),
        (Card(0, n_of_process=2, inside=[PLACE], doing="replay 2"), "", ""),
        (
            Card(
                0, n_of_process=2, inside=[PLACE], doing="replay 2", silent_s=1.5, state="stopped"
            ),
            "its process is stopped",
            f"{HERE}: its process is stopped",
        ),
        (
            Card(0, n_of_process=1, doing="replay 2", beat="config a", silent_s=1.5),
            "no sign of life for 1.5 s after config a",
            ABSENT,
        ),
        (
            Card(0, n_of_process=1, inside=[Place("m.other", 2)], doing="replay 2"),
            "replay 2 of m.other",
            f"{ABSENT}: it is in call 2 of other",
        ),
        (Card(), "no call with this group yet", ABSENT),
    ],
)
def test_a_rank_that_others_wait_for_is_told_once(
    card: Card, told: str, shown: str, monkeypatch: pytest.MonkeyPatch
):
    """Two seconds after this rank began to wait, long before its collective times out, and again
    when it goes on.
    """
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity = Activity(0, (0, 1), lambda: 2, lambda: 2)
    activity.begin(PLACE)
    activity.inside.append(PLACE)
    for now[0] in (0.0, 0.6, 2.2, 4.4):
        if activity.is_waiting(lines.append):
            activity.compare({1: card}, lines.append)
    assert [told in line for line in lines] == [True] * bool(told)
    assert activity.late == shown
    activity.at("replay 3")
    activity.is_waiting(lines.append)
    assert lines[1:] == ["rank 0 goes on, after 4.4 s in which rank 1 was late"] * bool(told)
    assert activity.late == ""


@pytest.mark.parametrize("n_ranks", [2, 64, 4096])
def test_looks_of_all_ranks_are_bounded(n_ranks: int, monkeypatch: pytest.MonkeyPatch):
    """64 a second of all ranks together, or two of each rank in small groups; two of the first one,
    whose terminal tells, in all.
    """
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    each = [Activity(rank, range(n_ranks), lambda: 0, lambda: 0) for rank in (0, 1)]
    n_looks = [0, 0]
    for activity in each:
        activity.inside.append(PLACE)
    while now[0] < 200.0:
        now[0] += 0.25
        for rank, activity in enumerate(each):
            n_looks[rank] += activity.is_waiting(lambda line: None)
    assert n_looks[1] * n_ranks / 200 <= max(64 + 1, 2 * n_ranks if n_ranks <= 32 else 0)
    assert 1.9 < n_looks[0] / 200 <= 2


@pytest.mark.parametrize(
    ("error", "n_asked"),
    [(dist.DistNetworkError("Broken pipe"), 1), (dist.DistStoreError("wait timeout"), 3)],
)
def test_a_host_that_is_gone_is_not_asked_again(
    error: Exception, n_asked: int, monkeypatch: pytest.MonkeyPatch
):
    """Because torch tells of each request to it in twenty lines; one that is silent is."""
    rank, asked, threads = World().ranks[0], list[str](), {*threading.enumerate()}

    def fail(name: str, *args: object) -> None:
        asked.append(name)
        raise error

    with rank.calling("f"):
        rank.client.before = fail
        for now in (1e9, 2e9, 3e9, 4e9):  # it waits from the first one on
            monkeypatch.setattr(time, "monotonic", lambda now=now: now)
            rank.look(print)
            until(lambda: {*threading.enumerate()} <= threads)
    assert asked == ["check"] * n_asked


def _becomes(name: str, state: State) -> bool:
    end = time.monotonic() + 5.0
    while state_of(name) != state and time.monotonic() < end:
        time.sleep(0.01)
    return state_of(name) == state


@pytest.mark.processes
def test_a_process_runs_is_stopped_and_ends():
    """Also one that has ended and was not waited for; a later process of its number is another one;
    of other hosts nothing is said.
    """
    here, pid, start = process_name().rsplit(" ", 2)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        name = (
            f"{here} {child.pid}"
            f" {Path(f'/proc/{child.pid}/stat').read_text().rpartition(') ')[2].split()[19]}"
        )
        assert _becomes(name, "runs")
        os.kill(child.pid, signal.SIGSTOP)
        assert _becomes(name, "stopped")
        child.kill()
        assert _becomes(name, "gone")
    assert state_of(name) == state_of(f"{here} {pid} {int(start) + 1}") == "gone"
    assert state_of(process_name()) == "runs"
    assert {
        state_of(each)
        for each in (f"other {pid} {start}", "", "x", f"{here} -1 {start}", f"{here} ../1 5")
    } == {""}


@pytest.mark.parametrize("process", ["", DEAD])
def test_the_host_of_the_store_waits_a_moment_for_peers_that_do_not_end(
    process: str, monkeypatch: pytest.MonkeyPatch
):
    """They may still read from it; one that was killed is not waited for, and for none longer than
    a moment. No thread goes on asking.
    """
    now, slept, threads = [0.0], list[float](), {*threading.enumerate()}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store: Any = dist.HashStore()
    host = Presence(store, store, Activity(0, [0, 1], lambda: 0, lambda: 0))
    store.set("beat/1", "")
    store.set("card/1", CARD.dump_json(Card(question=0, process=process)).decode())

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += 100 * seconds

    monkeypatch.setattr(time, "sleep", sleep)
    host.stop()
    assert (len(slept) > 1) == (not process)
    assert {*threading.enumerate()} <= threads
