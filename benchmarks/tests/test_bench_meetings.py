"""The model of meetings, against what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_meetings import Measured, fitted, report

TABLE = [Measured(**each) for each in json.loads((Path(__file__).parents[2] / "logs/meetings-cpu/meetings.json").read_text())]


@pytest.mark.parametrize("one", TABLE, ids=str)
def test_the_model_is_near_what_was_measured(one: Measured):
    """Within a factor of five: two cores have no core for each process."""
    assert 1 / 5 < fitted(TABLE).meeting_ms(one.n_ranks) / one.ms < 5


def test_agreement_takes_less_than_a_fiftieth_of_a_cold_tuning_at_256_ranks():
    """By the model; and more ranks cost more."""
    model = fitted(TABLE)
    assert model.tuning_share(256) < 0.02
    assert model.meeting_ms(256) < model.meeting_ms(4096)
    assert "| 4096 |" in report(TABLE)
