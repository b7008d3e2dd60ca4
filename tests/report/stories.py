"""Records of tunings that never ran, for tests: each number the same at every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dist_tune.cli.records import packed
from dist_tune.records.record import CandidateRecord, Seconds, TuningRecord
from tests import cached_records
from tests.cached_records import environment

FORGED = "<script>document.title='forged'</script>"


def record(
    number: int = 0, n_candidates: int = 200, n_ranks: int = 4, **changes: Any
) -> TuningRecord:
    """A site whose times depend on BLOCK_M most, then on num_warps; a sixth of its candidates do
    not run.
    """
    candidates = [_candidate(number, index, n_ranks) for index in range(n_candidates)]
    timed = sorted(
        (each for each in candidates if each.latency_ms is not None),
        key=lambda each: each.latency_ms or 0.0,
    )
    for place, each in enumerate(timed):
        left = (
            None
            if place < 2
            else "left the finals after round 0"
            if place < 5
            else "left the race after round 2"
        )
        candidates[each.index] = each.model_copy(
            update={
                "left": left,
                "closure_ms": (each.latency_ms or 0.0) + 0.4 if place < 5 else None,
            }
        )
    values: dict[str, Any] = {
        "kernel": f"model.gemm_{number}",
        "key": f"[{512 * (number + 1)},2752,torch.bfloat16]",
        "winner": timed[0].index,
        "reason": "",
        "candidates": candidates,
        "n_replays": 420,
        "closure_weight": 0.3,
        "seconds": 14.2,
        "spent": Seconds(
            total=14.2, discover=1.1, compile=6.0, race=5.5, finals=1.2, apply=0.4, meetings=0.8
        ),
        "environment": environment(world_size=n_ranks, ranks_per_host=n_ranks),
    }
    return cached_records.record(**{**values, **changes})


def _candidate(number: int, index: int, n_ranks: int) -> CandidateRecord:
    fields: dict[str, Any] = {
        "BLOCK_M": 16 << index % 4,
        "num_warps": 2 << index // 4 % 3,
        "BLOCK_N": 32 + index // 12,
        "num_stages": 2,
    }
    values: dict[str, Any] = {
        "config": " ".join(f"{name}={value}" for name, value in fields.items()),
        "fields": fields,
        "left": None,
    }
    if (index + number) % 6 == 4:
        reason = (
            f"rank {index % n_ranks}: OutOfResources: out of resource: shared memory, required:"
            " 300000, limit: 232448"
        )
        nothing: dict[str, Any] = {
            "latency_ms": None,
            "closure_ms": None,
            "spread_ms": None,
            "rank_latencies_ms": {},
            "n_replays": 0,
        }
        return cached_records.candidate(index, failure=reason, **values, **nothing)
    ms = (
        0.1
        * (128 / fields["BLOCK_M"]) ** 0.8
        * (8 / fields["num_warps"]) ** 0.3
        * (1 + index / 3000)
    )
    ranks_ms = {rank: ms * (0.98 + 0.02 * (rank + 1) / n_ranks) for rank in range(n_ranks)}
    return cached_records.candidate(
        index,
        latency_ms=ms,
        spread_ms=ms * 0.004,
        rank_latencies_ms=ranks_ms,
        closure_ms=None,
        **values,
    )


def export(path: Path, n_sites: int = 2, n_candidates: int = 40, n_ranks: int = 4) -> Path:
    """A file with the records of one tuning."""
    path.write_bytes(packed([record(number, n_candidates, n_ranks) for number in range(n_sites)]))
    return path
