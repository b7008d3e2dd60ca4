"""Tuning records for tests of what is kept of a tuning: each with all its fields set, and any of
them changed.
"""

from datetime import UTC, datetime
from typing import Any

from dist_tune.records.record import CandidateRecord, Environment, Seconds, TuningRecord

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def environment(**changes: Any) -> Environment:
    values = {
        "device": "NVIDIA H200",
        "device_count": 4,
        "world_size": 4,
        "ranks_per_host": 4,
        "python": "3.11",
        "torch": "2.13.0",
        "triton": "3.6.0",
        "cuda": "13.0",
    }
    return Environment(**{**values, **changes})


def candidate(index: int, **changes: Any) -> CandidateRecord:
    values: dict[str, Any] = {
        "index": index,
        "config": f"BLOCK_M={16 << index % 4} num_warps=4 SCALE={index}",
        "fields": {
            "BLOCK_M": 16 << index % 4,
            "num_warps": 4,
            "FAST": True,
            "SCALE": index + 0.5,
            "MODE": "x",
            "NONE": None,
        },
        "latency_ms": 0.1 + index,
        "spread_ms": 0.01,
        "closure_ms": 0.3 + index,
        "n_replays": 5,
        "rank_latencies_ms": {rank: 0.1 + index + rank / 7 for rank in range(16)},
        "left": None if index else "rung 2",
        "shared_bytes": 98304,
        "n_regs": 255,
        "n_spills": 0,
    }
    return CandidateRecord(**{**values, **changes})


def record(n_candidates: int = 3, **changes: Any) -> TuningRecord:
    values: dict[str, Any] = {
        "closure": "step",
        "kernel": "model.gemm",
        "key": "[4096,2752,torch.bfloat16]",
        "source": "0123456789abcdef",
        "winner": 1,
        "reason": "fastest step",
        "candidates": [candidate(index) for index in range(n_candidates)],
        "n_replays": 90,
        "closure_weight": 0.5,
        "seconds": 10.0,
        "spent": Seconds(total=10.0, race=8.0),
        "meeting_seconds": [0.001, 0.002],
        "environment": environment(),
        "tuned_at": NOON,
    }
    return TuningRecord(**{**values, **changes})


def measured(n_samples: int, **changes: Any) -> TuningRecord:
    """A record of the same candidates with this many timed replays."""
    return record(
        candidates=[
            candidate(0, n_replays=0),
            candidate(1, n_replays=n_samples),
            candidate(2, n_replays=0),
        ],
        **changes,
    )
