"""Records as tunings."""

from __future__ import annotations

from datetime import timedelta

from dist_tune.report import latest, tunings_of
from tests.cached_records import NOON
from tests.report.stories import record


def test_records_of_one_tuning_are_one_tuning():
    """They share the closure, its seconds and its replays; another tuning is told apart."""
    records = [record(0, 6), record(1, 6), record(2, 6, n_replays=3)]
    assert [len(each.sites) for each in tunings_of(records)] == [2, 1]
    (tuning,) = tunings_of(records[:2])
    assert tuning.title == "step"
    assert list(tuning.sites) == ["gemm_0 [512, 2752]", "gemm_1 [1024, 2752]"]


def test_two_sites_of_one_name_are_told_apart():
    """By their places."""
    (tuning,) = tunings_of([record(0, 6), record(0, 6)])
    assert len(tuning.sites) == 2


def test_the_latest_tuning_is_the_last_that_was_tuned():
    """In whatever order records are found."""
    late = record(0, 6, n_replays=3, tuned_at=NOON + timedelta(hours=1))
    assert latest([late, record(1, 6), record(2, 6)]) == [late]
    assert latest([]) == []
