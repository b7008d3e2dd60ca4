"""Differences between records."""

from __future__ import annotations

from typing import Any

import pytest

from dist_tune.records import TuningRecord
from dist_tune.report import compare, comparison_lines
from tests.cached_records import candidate, environment, record

KEY = "[4096,2752,torch.bfloat16]"


def with_winner(latency_ms: float | None, spread_ms: float | None = 0.01) -> TuningRecord:
    return record(
        candidates=[
            candidate(0),
            candidate(1, latency_ms=latency_ms, spread_ms=spread_ms),
            candidate(2),
        ]
    )


@pytest.mark.parametrize(
    ("after", "spread_ms", "verdict"),
    [
        (1.015, 0.01, "as fast"),
        (1.03, 0.01, "slower"),
        (0.9, 0.01, "faster"),
        (None, 0.01, "unknown"),
        (1.009, None, "as fast"),
        (1.011, None, "slower"),
        (1.009, 0.0, "as fast"),
    ],
)
def test_a_winner_is_slower_beyond_the_noise_alone(
    after: float | None, spread_ms: float | None, verdict: str
):
    """The spreads of both winners added, of 1 ms; at least 1 %, because two tunings of one kernel
    differ by as much.
    """
    found = compare([with_winner(1.0, spread_ms)], [with_winner(after, spread_ms)])
    assert (found["pairs"][0]["verdict"], found["n_slower"]) == (verdict, int(verdict == "slower"))
    assert found["pairs"][0]["noise_ms"] == (0.02 if spread_ms else 0.01)


def test_what_changed_is_named():
    """Versions, code, candidates, the winner; and what is equal is not."""
    other = record(4, environment=environment(triton="3.9.0"), source="fedcba", winner=2)
    changes = {
        each["name"]: (each["before"], each["after"])
        for each in compare([record()], [other])["pairs"][0]["changes"]
    }
    known = {
        "triton": ("3.6.0", "3.9.0"),
        "code": ("0123456789abcdef", "fedcba"),
        "candidates": ("3", "4, 3 in common"),
    }
    assert changes.items() >= {**known, "winner": (record().best.config, other.best.config)}.items()
    assert "torch" not in changes
    assert compare([record()], [record()])["pairs"][0]["changes"] == []


def test_records_are_matched_by_kernel_and_key():
    """Of several with one key the one that has most in common, of a kernel's two single ones any;
    what has no partner is named.
    """
    far: Any = {"environment": environment(device="NVIDIA H100", world_size=8)}
    found = compare(
        [record(), record(kernel="gone")], [record(**far), record(), record(key="[new]")]
    )
    assert (found["pairs"][0]["changes"], found["only_before"]) == ([], [f"gone {KEY}"])
    assert found["only_after"] == [f"model.gemm {KEY}", "model.gemm [new]"]
    moved = [
        {"name": "kernel", "before": "model.gemm", "after": "models.gemm"},
        {"name": "key", "before": KEY, "after": "[2]"},
    ]
    assert (
        compare([record()], [record(kernel="models.gemm", key="[2]")])["pairs"][0]["changes"]
        == moved
    )
    assert compare([record()], [record(kernel="model.attention")])["pairs"] == []


def test_the_lines_have_the_times_and_the_summary_counts():
    lines = comparison_lines(compare([with_winner(1.0)], [with_winner(2.0)]))
    assert lines == [
        f"model.gemm {KEY}: 1.000 -> 2.000 ms (2x slower), slower; noise 0.02 ms",
        "1 compared: 1 slower",
    ]
    assert (
        comparison_lines(compare([record()], [record(kernel="gone")]))[-1]
        == f"only in the second: gone {KEY}"
    )
