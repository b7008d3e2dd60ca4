"""The model of meetings, against what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_meetings import Measured, fitted, report

TABLE = [Measured(**each) for each in json.loads((Path(__file__).parents[2] / "logs/meetings-cpu/meetings.json").read_text())]


@pytest.mark.parametrize("one", [each for each in TABLE if not each.is_two_level], ids=str)
def test_the_model_is_near_what_was_measured_on_one_level(one: Measured):
    """Within a factor of five: two cores have no core for each process. Two levels took 2 to 13 times as long as modelled."""
    assert 1 / 5 < fitted(TABLE).flat_ms(one.n_ranks) / one.ms < 5


def test_two_levels_spare_the_store_of_the_job():
    """Less than half of its calls and of its CPU time, measured with as many ranks."""
    for two in (each for each in TABLE if each.is_two_level):
        flat = next(each for each in TABLE if each.n_ranks == two.n_ranks and not each.is_two_level)
        assert two.calls < flat.calls / 2
        assert two.store_us < flat.store_us / 2


def test_agreement_takes_less_than_a_hundredth_of_a_cold_tuning_at_256_ranks():
    """By the model, on two levels; and more ranks cost more."""
    model = fitted(TABLE)
    assert model.tuning_share(256, is_two_level=True) < 0.01
    assert model.two_level_ms(256) < model.flat_ms(256)
    assert model.two_level_ms(256) < model.two_level_ms(4096) < model.flat_ms(4096)
    assert "| 4096 |" in report(TABLE)
