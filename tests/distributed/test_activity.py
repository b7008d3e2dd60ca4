"""What a rank notes of its runs, and which of its peers it tells of as late, on a clock that the test moves."""

from __future__ import annotations

import time

import pytest

from dist_tune.distributed.activity import Activity
from dist_tune.distributed.calls import Calls, Card, Peer, Place
from dist_tune.distributed.messages import Header
from dist_tune.distributed.verdicts import cause_of

pytestmark = pytest.mark.once

TWO = [(1, 2), (2, 2), (3, 2)]
PLACE = Place("step", 1)


def header(runs: list[tuple[int, int]], odd: dict[int, str] | None = None, troubles: list[str] | None = None) -> Header:
    return Header("step", "t", runs, odd or {}, 0, troubles or [], None)


@pytest.mark.parametrize(
    ("headers", "cause"),
    [
        ({0: header(TWO), 1: header(TWO)}, None),
        ({0: header(TWO), 1: header([*TWO[:2], (3, 1)], {3: "replay 3, config a"})}, (1, "replay 3, config a")),
        ({0: header(TWO[:2]), 1: header([*TWO[:2], (3, 1)], {3: "replay 3, config a"})}, (1, "replay 3, config a")),
        ({0: header([(1, 2), (2, 1)]), 1: header([(1, 2), (2, 1)])}, None),
        ({0: header(TWO[:2]), 1: header(TWO)}, None),
        ({0: header([]), 1: header([(1, 0)])}, None),
        ({0: header(TWO, troubles=["config a"]), 1: header([(1, 1)])}, (0, "left config a, between")),
        ({0: header(TWO)._replace(late=(1, "was late: config b")), 1: header(TWO)}, (1, "was late: config b")),
    ],
    ids=["in step", "skipped", "skipped, while the other is in it", "fewer on both", "one is ahead", "first run", "failed", "late"],
)
def test_the_rank_that_left_others_in_a_collective_is_found(headers: dict[int, Header], cause: tuple[int, str] | None):
    """A run that takes fewer collectives on all ranks is no cause, nor is one that only some have come to."""
    found = cause_of(headers)
    assert (found is None) == (cause is None)
    if found is not None and cause is not None:
        assert found[0] == cause[0]
        assert cause[1] in found[1]


def test_runs_with_another_number_of_collectives_are_noted():
    """Beside most of the latest runs: named for peers, and a run like most others is not."""
    n_issued = [0]
    activity = Activity(0, [0, 1], lambda: 0, lambda: n_issued[0])
    for counts, odd in (([2, 2, 1, 2, 2], [2]), ([1, 2, 2, 2, 2, 1], [1, 2, 5]), ([3, 3, 3], [])):
        activity.begin()
        for number, n in enumerate(counts):
            with activity.run(number, f"replay {number}"):
                n_issued[0] += n
        assert list(activity.odd) == odd


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        (
            Peer(Card(1, "", 0, {}, [PLACE], "the meeting", n_of_process=1)),
            "after 1 collectives of its process where rank 0 is in number 2",
        ),
        (Peer(Card(1, "", 0, {}, [PLACE], "replay 2", n_of_process=2)), ""),
        (Peer(Card(1, "", 0, {}, [PLACE], "replay 2", n_of_process=2), silent_s=1.5, state="stopped"), "its process is stopped"),
        (Peer(None), "nothing yet"),
    ],
)
def test_a_rank_that_others_wait_for_is_told_once(peer: Peer, told: str, monkeypatch: pytest.MonkeyPatch):
    """Two seconds after this rank began to wait, long before its collective times out, and again when it goes on."""
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity = Activity(0, (0, 1), lambda: 2, lambda: 2)
    activity.calls["step"] = Calls(1, [PLACE])
    activity.begin()
    for now[0] in (0.0, 0.6, 2.2, 4.4):
        if activity.is_waiting(lines.append):
            activity.compare({1: peer}, lines.append)
    assert [told in line for line in lines] == [True] * bool(told)
    activity.at("replay 3")
    activity.is_waiting(lines.append)
    assert len(lines) == 2 * bool(told)
    assert not told or lines[1] == "rank 0 goes on, after 4.4 s in which rank 1 was late"


@pytest.mark.parametrize("n_ranks", [2, 64, 4096])
def test_looks_of_all_ranks_are_bounded(n_ranks: int, monkeypatch: pytest.MonkeyPatch):
    """64 a second of all ranks together, or two of each rank in small groups."""
    now, n_looks = [0.0], 0
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity = Activity(0, range(n_ranks), lambda: 0, lambda: 0)
    activity.calls["step"] = Calls(1, [PLACE])
    while now[0] < 200.0:
        now[0] += 0.25
        n_looks += activity.is_waiting(lambda line: None)
    assert n_looks * n_ranks / 200 <= max(64 + 1, 2 * n_ranks if n_ranks <= 32 else 0)
