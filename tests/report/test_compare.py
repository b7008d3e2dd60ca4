"""Differences between records."""

from __future__ import annotations

from typing import Any

import pytest

from dist_tune.cache.records import TuningRecord
from dist_tune.report import compare, comparison_lines
from tests.cached_records import candidate, environment, record

pytestmark = pytest.mark.once


def with_winner(latency_ms: float | None, spread_ms: float | None = 0.01, **changes: Any) -> TuningRecord:
    return record(candidates=[candidate(0), candidate(1, latency_ms=latency_ms, spread_ms=spread_ms), candidate(2)], **changes)


@pytest.mark.parametrize(
    ("after", "spread_ms", "verdict"),
    [
        (1.015, 0.01, "as fast"), (1.03, 0.01, "slower"), (0.9, 0.01, "faster"), (None, 0.01, "unknown"),
        (1.009, None, "as fast"), (1.011, None, "slower"), (1.009, 0.0, "as fast"),
    ],
)  # fmt: skip
def test_a_winner_is_slower_beyond_the_noise_alone(after: float | None, spread_ms: float | None, verdict: str):
    """The spreads of both winners added, of 1 ms; at least 1 %, because two tunings of one kernel differ by as much."""
    found = compare([with_winner(1.0, spread_ms)], [with_winner(after, spread_ms)])
    assert (found["pairs"][0]["verdict"], found["n_slower"]) == (verdict, int(verdict == "slower"))
    assert found["pairs"][0]["noise_ms"] == (0.02 if spread_ms else 0.01)


def test_what_changed_is_named():
    """Versions, code, candidates, the winner; and what is equal is not."""
    other = record(4, environment=environment(triton="3.9.0"), source="fedcba", winner=2)
    changes = {each["name"]: (each["before"], each["after"]) for each in compare([record()], [other])["pairs"][0]["changes"]}
    assert changes["triton"] == ("3.6.0", "3.9.0")
    assert changes["code"] == ("0123456789abcdef", "fedcba")
    assert changes["candidates"] == ("3", "4, 3 in common")
    assert changes["winner"] == ("BLOCK_M=32 num_warps=4 SCALE=1", "BLOCK_M=64 num_warps=4 SCALE=2")
    assert "torch" not in changes
    assert compare([record()], [record()])["pairs"][0]["changes"] == []


def test_records_of_two_folders_are_matched_by_kernel_and_key():
    """Of several with one key the one that has most in common; what has no partner is named."""
    near, far = record(), record(environment=environment(device="NVIDIA H100", world_size=8))
    found = compare([near, record(kernel="gone")], [far, near, record(key="[new]")])
    assert found["pairs"][0]["changes"] == []
    assert found["only_before"] == ["gone [4096,2752,torch.bfloat16]"]
    assert set(found["only_after"]) == {"model.gemm [new]", "model.gemm [4096,2752,torch.bfloat16]"}


def test_two_single_records_of_one_kernel_are_compared_whatever_their_keys():
    """They were named one by one; the kernel may have moved to another module. Times of two kernels are not compared."""
    found = compare([record(key="[1]")], [record(key="[2]")])
    assert found["pairs"][0]["changes"] == [{"name": "key", "before": "[1]", "after": "[2]"}]
    moved = {"name": "kernel", "before": "model.gemm", "after": "models.gemm"}
    assert compare([record()], [record(kernel="models.gemm")])["pairs"][0]["changes"] == [moved]
    assert compare([record()], [record(kernel="model.attention")])["pairs"] == []


def test_the_summary_counts():
    found = compare([with_winner(1.0)], [with_winner(2.0)])
    assert comparison_lines(found)[0] == "model.gemm [4096,2752,torch.bfloat16]: 1 -> 2 ms (+100.0 %), slower; noise 0.02 ms"
    assert comparison_lines(found)[-1] == "1 compared: 1 slower"
    assert comparison_lines(compare([record()], [record(kernel="gone")]))[-1] == "only in the second: gone [4096,2752,torch.bfloat16]"
