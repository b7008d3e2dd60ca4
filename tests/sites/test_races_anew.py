"""Samples of an interrupted tuning, where a site races a second time beside another config of the function around it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dist_tune.search import Samples, Trial
from dist_tune.sites import TuningJournal

pytestmark = pytest.mark.once


def test_a_race_that_begins_anew_takes_no_samples_of_the_earlier_attempt():
    """They may be of replays beside the config that the function ran in the site's first race."""
    journal = TuningJournal("step", 0, 1, cast(Any, None))
    journal.adopt({"product": {0: [3, 2]}, "way": {0: [1, 0]}})
    race = [{"product": Trial(0, is_timed=True)}]
    assert journal.serve(race, Samples(), is_final=False) == []
    journal.begin_anew("product")
    assert journal.serve(race, Samples(), is_final=False) == race
    assert journal.serve(race, Samples(), is_final=True) == race
    assert journal.serve([{"way": Trial(0, is_timed=True)}], Samples(), is_final=False) == []
