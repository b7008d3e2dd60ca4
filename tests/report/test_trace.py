"""The trace for Chrome and Perfetto."""

from __future__ import annotations

import json

import pytest

from dist_tune.report import Story, trace_events
from tests.report.stories import events, record

pytestmark = pytest.mark.once


def test_each_rank_is_a_process_with_its_threads():
    """Phases, replays, meetings, and the three compile workers; each span lies after the beginning and has a duration."""
    told = Story()
    for rank in range(2):
        for event in events([record(0, 20)], rank, 2):
            told.take(event)
    found = json.loads(json.dumps(list(trace_events(told)), allow_nan=False))
    names = {(each["pid"], each["args"]["name"]) for each in found if each["ph"] == "M" and "name" in each["args"]}
    threads = ("phases", "replays", "meetings", "compile worker 0", "compile worker 1", "compile worker 2")
    assert names == {(rank, f"rank {rank} (node-1, NVIDIA H200)") for rank in range(2)} | {
        (rank, each) for rank in range(2) for each in threads
    }
    spans = [each for each in found if each["ph"] == "X"]
    assert len(spans) == 2 * (5 + 40 + 4 + 10)
    assert all(each["ts"] >= 0 and each["dur"] >= 0 for each in spans)
    assert {each["name"] for each in spans if each["tid"] == 1} == {"discover", "compile", "race", "finals", "settle"}
    assert [each["name"] for each in found if each["ph"] == "i" and each["name"].startswith("winner")] == [
        f"winner: site 0 candidate {record(0, 20).winner}"
    ]


def test_no_rank_is_no_trace():
    assert list(trace_events(Story())) == []
