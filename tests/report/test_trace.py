"""The trace for Chrome and Perfetto."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dist_tune.output.events import PhaseBegun, TuningEnded
from dist_tune.report import Story, trace_events
from tests.report.stories import events, record

pytestmark = pytest.mark.once


def test_each_rank_is_a_process_with_its_threads():
    """Phases, replays, meetings, and three compile workers; names first, then spans and marks by time, as viewers expect them."""
    told = Story()
    for rank in range(2):
        for event in events([record(0, 20)], rank, 2):
            is_failed = rank == 1 and event.kind == "done"
            told.take(event.model_copy(update={"error": "ValueError: x"}) if is_failed else event)
    found = json.loads(json.dumps(list(trace_events(told)), allow_nan=False))
    names = {(each["pid"], each["args"]["name"]) for each in found if each["ph"] == "M" and "name" in each["args"]}
    threads = ("phases", "replays", "meetings", "compile worker 0", "compile worker 1", "compile worker 2")
    assert names == {(rank, each) for rank in range(2) for each in (*threads, f"rank {rank} (node-1, NVIDIA H200)")}
    spans = [each for each in found if each["ph"] == "X"]
    assert len(spans) == 2 * (5 + 40 + 4 + 10)
    assert all(each["ts"] >= 0 and each["dur"] >= 0 for each in spans)
    assert {each["name"] for each in spans if each["tid"] == 1} == {"discover", "compile", "race", "finals", "settle"}
    marks = [each["name"] for each in found if each["ph"] == "i"]
    assert f"winner: site 0 candidate {record(0, 20).winner}" in marks
    assert [each for each in marks if each.startswith("failed")] == ["failed: ValueError: x"]
    times = [each["ts"] for each in found if each["ph"] != "M"]
    assert times == sorted(times)
    assert [each["ph"] == "M" for each in found] == [True] * (len(found) - len(times)) + [False] * len(times)


def test_no_rank_is_no_trace():
    assert list(trace_events(Story())) == []


@pytest.mark.parametrize(("total_s", "end_s"), [(3.0, 3.0), (0.0, 4.0)])
def test_the_last_phase_ends_with_the_tunings_seconds(total_s: float, end_s: float):
    """Records are written after them: a time line drew 0.58 s of a phase that took 0.29 s."""
    told = Story()
    of: dict[str, Any] = {"rank": 0, "tuning": "t"}
    told.take(PhaseBegun(at=5.0, phase="discover", **of))
    told.take(PhaseBegun(at=7.0, phase="settle", **of))
    told.take(TuningEnded(at=9.0, seconds={"total": total_s} if total_s else {}, **of))
    ends = {each["name"]: each["ts"] + each["dur"] for each in trace_events(told) if each["ph"] == "X"}
    assert ends == {"discover": 2_000_000, "settle": round(end_s * 1e6)}
