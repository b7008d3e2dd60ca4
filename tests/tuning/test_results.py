"""The record of a site: figures that fit together."""

from __future__ import annotations

import pytest

from dist_tune.search import CandidateResult
from dist_tune.search.plan import Times
from dist_tune.tuning.results import _candidate, table_rows
from tests.cached_records import candidate, record

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("closure_ms", "n_launches", "step_ms"), [(0.5, 1, 0.5), (0.1057, 1, 0.2), (0.3, 2, 0.4)])
def test_no_step_is_shorter_than_its_launches(closure_ms: float, n_launches: int, step_ms: float):
    """On two H200 a step of 0.106 ms was told of a kernel of 0.229 ms: what other sites added to it had been guessed too high."""
    times = Times(0.2, closure_ms, n_launches=n_launches)
    found = _candidate(0, "a", CandidateResult(times, None, None), None)
    assert (found.latency_ms, found.closure_ms) == (0.2, step_ms)


def test_a_wide_table_has_headings_in_two_rows_and_a_row_for_each_candidate():
    """Six fields, two ranks and resources: on two H200 each candidate took two rows of the log, the second with its reason."""
    names = ["BLOCK_M", "BLOCK_N", "FLATTEN", "SPLIT_STORE", "num_warps", "num_stages"]
    figures = {"latency_ms": 0.2671, "closure_ms": 0.2634, "spread_ms": 0.001, "rank_latencies_ms": {0: 0.2617, 1: 0.2671}}
    rows = [
        candidate(
            k, fields=dict.fromkeys(names, 128 + k), left="left the race after rung 0" if k else None, n_replays=15,
            shared_bytes=196740, n_regs=174, n_spills=0, **figures,
        )
        for k in range(3)
    ]  # fmt: skip
    _, first, second, *others = table_rows(record(candidates=rows, winner=0), "k")
    assert first.split() == ["BLOCK_", "BLOCK_", "SPLIT_", "num_", "num_"]
    assert second.split()[-9:] == ["M", "N", "FLATTEN", "STORE", "warps", "stages", "shared", "regs", "spills"]
    assert len(others) == 3
    assert all(len(f"12:00:00.000 INFO    {line}") <= 160 for line in others[1:])
    assert first.index("SPLIT_") + len("SPLIT_") == second.index("STORE") + len("STORE")
