"""Figures of settled sites, on records small enough to check by hand."""

from __future__ import annotations

from typing import Any

import pytest

from dist_tune.cache.records import TuningRecord
from dist_tune.output.events import Met
from dist_tune.report import facts
from dist_tune.report.story import RankStory, TuningStory
from tests.cached_records import candidate, record

pytestmark = pytest.mark.once


def site(*times: float | None, winner: int = 0, **changes: Any) -> TuningRecord:
    """A record with these times; None failed."""
    candidates = [
        candidate(i, latency_ms=ms, spread_ms=None if ms is None else 0.01, failure="rank 0: no" if ms is None else None, left=None)
        for i, ms in enumerate(times)
    ]
    return record(candidates=candidates, winner=winner, **changes)


@pytest.mark.parametrize(
    ("times", "winner", "words"),
    [
        ((1.1, 1.0, 1.5), 1, "10.0 % ahead of the next kernel, 5.0 x the noise"),
        ((1.0, 1.01), 0, "1.0 % ahead of the next kernel, within the noise (2.0 %)"),
        ((1.0, 2.0), 1, "50.0 % behind the fastest kernel, 50.0 x the noise"),
        ((1.0, None), 0, "nothing to compare with"),
    ],
)
def test_a_lead_is_told_beside_the_noise(times: tuple[float | None, ...], winner: int, words: str):
    """The spreads of the winner and of the fastest other, added: 0.02 ms here. A winner by its step may have the slower kernel."""
    assert facts.confidence(site(*times, winner=winner)) == words


def test_the_last_to_come_is_the_one_who_waits_least():
    """Rank 1 waits 0.1 s less than the others at two of three meetings; no clock of a host is read."""
    tuning = TuningStory("t")
    for rank, waits in enumerate([(0.2, 0.2, 0.0), (0.1, 0.1, 0.3), (0.2, 0.2, 0.3)]):
        tuning.ranks[rank] = RankStory(rank, meetings=[Met(at=1000.0 * rank, rank=rank, topic="rung", seconds=s) for s in waits])
    first, second = "rank 0 (1 of 3 meetings, the others waited 0.3 s)", "rank 1 (2 of 3 meetings, the others waited 0.2 s)"
    assert facts.stragglers(tuning) == f"{first}, {second}"


def test_phases_add_up_to_the_total():
    """Meetings are a part of them, and what is left is called other."""
    tuning = TuningStory("t", seconds={"total": 10.0, "compile": 6.0, "race": 3.0, "meetings": 2.0}, n_replays=1)
    told = {"took": "10.0 s (compile 6.0, race 3.0, other 1.0), 1 replay", "meetings": "2.00 s, a part of the phases"}
    assert facts.told(tuning) == told
    assert facts.told(TuningStory("t", seconds={"total": 9.0, "compile": 6.0, "race": 3.0})) == {
        "took": "9.0 s (compile 6.0, race 3.0), 0 replays"
    }


def test_the_parameter_that_decides_explains_most():
    """A alone decides, B does not matter, C is the same for all."""
    fields = [{"A": a, "B": b, "C": 1} for a in (16, 128, 64) for b in ("x", "y", "z")]
    candidates = [
        candidate(i, fields=each, latency_ms=float(each["A"]) * (1 + 0.01 * (i % 2)), failure=None) for i, each in enumerate(fields)
    ]
    explained = facts.parameters(record(candidates=candidates))
    assert list(explained) == ["A", "B"]
    assert explained["A"] > 0.99
    assert explained["B"] < 0.1
