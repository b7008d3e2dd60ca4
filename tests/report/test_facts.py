"""Figures of settled sites, on records small enough to check by hand."""

from __future__ import annotations

from typing import Any

import pytest

from dist_tune.cache.records import TuningRecord
from dist_tune.report import facts
from dist_tune.report.importance import parameters
from dist_tune.report.story import RankStory, Span, TuningStory
from tests.cached_records import candidate, record

pytestmark = pytest.mark.once


def site(*times: float | None, winner: int = 0, **changes: Any) -> TuningRecord:
    """A record with these times; None failed."""
    candidates = [
        candidate(i, latency_ms=ms, spread_ms=None if ms is None else 0.01, failure="rank 0: no" if ms is None else None, left=None)
        for i, ms in enumerate(times)
    ]
    return record(candidates=candidates, winner=winner, **changes)


def test_the_gain_is_over_the_first_config_that_runs():
    """A first config that fails is no base."""
    assert facts.gain(site(None, 3.0, 2.0, winner=2)) == 1.5


def test_the_lead_is_told_with_its_noise():
    """Both spreads added: 0.02 of 1.0."""
    ahead = facts.lead(site(1.1, 1.0, 1.5, winner=1))
    assert ahead is not None
    assert (round(ahead.share, 6), ahead.noise) == (0.1, 0.02)
    assert ahead.words == "10.0 % ahead of the next, 5.0 x the noise"


def test_a_lead_within_the_noise_is_a_tie():
    """1 % where the noise is 2 %."""
    ahead = facts.lead(site(1.0, 1.01))
    assert ahead is not None
    assert ahead.words == "tied with the next within the noise (+1.0 %, noise 2.0 %)"


def test_a_winner_chosen_by_the_step_may_have_the_slower_kernel():
    """Then its lead is negative, and says so."""
    ahead = facts.lead(site(1.0, 2.0, winner=1))
    assert ahead is not None
    assert ahead.words == "kernel 50.0 % behind the fastest, chosen by the step"


def test_an_only_candidate_leads_nothing():
    assert facts.lead(site(1.0, None)) is None


def test_the_slowest_rank_is_named_with_its_distance():
    """Rank 15 of the fixture's 16."""
    drag = facts.skew(record())
    assert drag is not None
    assert drag.rank == 15
    assert facts.skew(site(1.0).model_copy(update={"candidates": [candidate(0, rank_latencies_ms={0: 1.0})]})) is None


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({"left": "left the race after rung 0"}, "left rung 0"),
        ({"left": "left the race after rung 7"}, "left rung 2 or later"),
        ({"left": "left the finals after round 1"}, "left the finals"),
        ({"left": None}, "to the end"),
        ({"failure": "rank 1: OutOfResources"}, "dropped"),
        ({"latency_ms": None, "left": "not raced: slower in an earlier tuning"}, "not raced"),
    ],
)
def test_the_fate_of_a_candidate_follows_from_its_record(changes: dict[str, Any], fate: str):
    each = candidate(2, **changes)
    assert facts.fate(record(), each) == fate
    assert fate in facts.FATES


def test_the_last_to_come_is_the_one_who_waits_least():
    """Rank 1 waits 0.1 s less than the others at two of three meetings; no clock of a host is read."""
    tuning = TuningStory("t")
    for rank, waits in enumerate([(0.2, 0.2, 0.0), (0.1, 0.1, 0.3), (0.2, 0.2, 0.3)]):
        meetings = [Span(1000.0 * rank, 1000.0 * rank + wait, "rung") for wait in waits]
        tuning.ranks[rank] = RankStory(rank, meetings=meetings)
    first, second = facts.stragglers(tuning)
    assert (first.rank, first.n_last, first.n_meetings, round(first.waited_s, 6)) == (0, 1, 3, 0.3)
    assert (second.rank, second.n_last, round(second.waited_s, 6)) == (1, 2, 0.2)


def test_phases_add_up_to_the_total():
    """Meetings are a part of them, and what is left is called other."""
    assert facts.phase_seconds({"total": 10.0, "compile": 6.0, "race": 3.0, "meetings": 2.0}) == {"compile": 6.0, "race": 3.0, "other": 1.0}
    assert facts.phase_seconds({"total": 9.0, "compile": 6.0, "race": 3.0}) == {"compile": 6.0, "race": 3.0}


def test_the_parameter_that_decides_explains_most():
    """A alone decides, B does not matter, C is the same for all."""
    fields = [{"A": a, "B": b, "C": 1} for a in (16, 128, 64) for b in ("x", "y", "z")]
    candidates = [
        candidate(i, fields=each, latency_ms=float(each["A"]) * (1 + 0.01 * (i % 2)), failure=None) for i, each in enumerate(fields)
    ]
    first, second = parameters(record(candidates=candidates))
    assert (first.name, first.values, second.name, second.values) == ("A", ["16", "64", "128"], "B", ["x", "y", "z"])
    assert first.explained > 0.99
    assert second.explained < 0.1
