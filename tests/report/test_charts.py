"""Charts as values, and their coordinates."""

from __future__ import annotations

import re
from math import isfinite

import pytest

from dist_tune.report.plots.charts import Chart, categories, linear, times
from dist_tune.report.plots.site_charts import site_charts
from dist_tune.report.plots.svg import draw
from dist_tune.report.plots.timeline import merged, shown_ranks, time_line
from dist_tune.report.story import RankStory, Span, TuningStory
from tests.cached_records import candidate
from tests.cached_records import record as small_record
from tests.report.stories import record

pytestmark = pytest.mark.once


@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.0, 0.0), (-3.0, 1234.5), (0.0, 1e-7), (5.0, 5.0)])
def test_an_axis_takes_in_both_ends_with_round_ticks(ends: tuple[float, float]):
    axis = linear("x", *ends)
    assert axis.low <= ends[0] <= ends[1] <= axis.high
    assert 2 <= len(axis.ticks) <= 12


def test_times_far_apart_are_on_a_log_scale():
    """Which the label says."""
    assert not times("time (ms)", [1.0, 7.0]).is_log
    axis = times("time (ms)", [0.1, 3.0])
    assert axis.is_log
    assert axis.label == "time (ms), log scale"
    assert [text for _, text in axis.ticks] == ["0.1", "0.2", "0.5", "1", "2"]
    assert [axis.at(axis.low), axis.at(axis.high)] == [0.0, 1.0]
    assert len(times("time (ms)", [0.001, 300.0]).ticks) >= 4


def test_many_categories_keep_room_for_their_names():
    axis = categories("x", [f"value {k}" for k in range(40)])
    assert 2 <= len(axis.ticks) <= 8


def test_a_site_has_a_chart_for_each_thing_that_matters():
    """Times, heat map, each parameter that differs, registers, spills, shared memory; all with labels and finite coordinates."""
    charts = site_charts(record(0, 200))
    parameters = {f"parameter-{name}" for name in ("block-m", "block-n", "block-k", "num-warps", "num-stages")}
    assert {chart.name for chart in charts} == {"times", "heat-map", "registers", "spills", "shared-memory"} | parameters
    assert [chart.name for chart in charts[:2]] == ["times", "heat-map"]
    assert "BLOCK_M and num_warps" in charts[1].title
    for chart in charts:
        assert chart.x.label
        assert chart.y.label
        assert all(isfinite(number) for number in numbers(chart))


def numbers(chart: Chart) -> list[float]:
    drawn = draw(chart)
    paths = " ".join(layer.path for layer in drawn.layers)
    return [float(text) for text in re.findall(r"-?[\d.]+(?:e-?\d+)?|nan|inf", paths)]


@pytest.mark.parametrize(
    "times_ms", [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, None, None], [None, 1.0, 2.0], [1e-9, 1e9, 1.0]], ids=str
)  # fmt: skip
def test_odd_times_have_charts_or_none(times_ms: list[float | None]):
    """Equal ones, zeros, too few, and some eighteen decades apart."""
    candidates = [candidate(i, latency_ms=ms, rank_latencies_ms={}) for i, ms in enumerate(times_ms)]
    for chart in site_charts(small_record(candidates=candidates)):
        assert all(isfinite(number) for number in numbers(chart))


def test_spans_that_the_eye_cannot_tell_apart_are_one():
    """Phases of different names stay apart."""
    spans = [Span(0.0, 1.0, "a"), Span(1.001, 2.0, "b"), Span(3.0, 4.0, "b")]
    assert merged(spans, 0.01) == [("a", 0.0, 2.0), ("b", 3.0, 4.0)]
    assert len(merged(spans, 0.01, by_name=True)) == 3


def test_of_many_ranks_the_time_line_shows_those_that_others_wait_for():
    """Rank 77 of 100 is late: it is among the 16, and named."""
    tuning = TuningStory("t")
    for number in range(100):
        wait = 0.0 if number == 77 else 0.5
        meetings = [Span(1.0, 1.0 + wait, "vote")]
        tuning.ranks[number] = RankStory(number, last_at=2.0, phases=[("race", 0.0, None)], meetings=meetings)
    ranks = shown_ranks(tuning)
    assert len(ranks) == 16
    chart = time_line(tuning, ranks)
    assert "rank 77 (last)" in [text for _, text in chart.y.ticks]
    assert chart.note.startswith("16 of 100 ranks")
    assert "rank 77 (1 of 1 meetings, the others waited 0.5 s)" in chart.note


def test_times_that_are_close_fill_the_axis():
    """Candidates of 0.25 to 0.30 ms on an axis from 0 are a flat line."""
    axis = times("time (ms)", [0.25, 0.3])
    assert 0.2 < axis.low <= 0.25
    assert times("time (ms)", [0.1, 0.7]).low == 0.0


def test_the_legend_of_the_time_line_names_phases_alone():
    """The axis names the lanes: "compile" and "compiling" in one colour told a reader nothing."""
    tuning = TuningStory("step")
    rank = RankStory(
        0,
        last_at=2.0,
        phases=[("discover", 0.0, None), ("compile", 1.0, None)],
        compiles=[Span(0.5, 1.5, "a")],
        meetings=[Span(1.0, 1.1, "b")],
    )
    chart = time_line(tuning, [rank])
    assert [mark.name for mark in chart.marks if mark.name] == ["discover", "compile"]
    assert [text for _, text in chart.y.ticks] == ["rank 0", "compiling", "meetings"]
