"""Event files of tunings that never ran, for tests: sites, ranks, stragglers, each number the same
at every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from dist_tune.log import events as kinds
from dist_tune.records.record import CandidateRecord, Seconds, TuningRecord
from tests import cached_records
from tests.cached_records import NOON, environment

BEGIN = NOON.timestamp()
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
            total=14.2, discover=1.1, compile=6.0, race=5.5, finals=1.2, settle=0.4, meetings=0.8
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


def header(rank: int, n_ranks: int = 4, at: float = BEGIN, **changes: Any) -> kinds.RunBegun:
    values: dict[str, Any] = {
        "at": at,
        "rank": rank,
        "date": (NOON + timedelta(seconds=at - BEGIN)).isoformat(),
        "host": "node-1",
        "pid": 4000 + rank,
        "world_size": n_ranks,
        "command": ["train.py", "--layers", "2"],
        "device": "NVIDIA H200",
        "versions": {
            "dist_tune": "0.2.0",
            "python": "3.11.7",
            "torch": "2.13.0",
            "triton": "3.6.0",
            "cuda": "13.0",
        },
    }
    return kinds.RunBegun(**{**values, **changes})


def events(
    records: list[TuningRecord],
    rank: int,
    n_ranks: int = 4,
    straggler: int = 3,
    name: str = "step#1",
) -> Iterator[kinds.AnyEvent]:
    """All that one rank tells of a tuning of these sites; ``straggler`` comes to each meeting 30 ms
    after the others.
    """
    now, of = BEGIN + 1.0, {"rank": rank, "tuning": name}

    def told(kind: Any, after_s: float = 0.0, **fields: Any) -> Any:
        nonlocal now
        now += after_s
        return kind(at=now, **fields, **of)

    def meeting(topic: str) -> Any:
        late_s = 0.03 if rank == straggler else 0.0
        return told(kinds.Met, 0.031, topic=topic, seconds=0.031 - late_s)

    yield header(rank, n_ranks)
    yield told(kinds.TuningBegun, closure="step", world_size=n_ranks, options={"search": "racing"})
    yield told(kinds.PhaseBegun, phase="discover")
    for number, each in enumerate(records):
        met = {
            "label": f"{each.kernel} {each.key}",
            "kernel": each.kernel,
            "key": each.key,
            "miss": "no record of this kernel and key",
        }
        yield told(
            kinds.SiteMet,
            0.02,
            site=number,
            configs=[one.config for one in each.candidates],
            n_pruned=16,
            **met,
        )
    yield meeting("manifest")
    yield told(kinds.PhaseBegun, phase="compile")
    for number, each in enumerate(records):
        for one in each.candidates:
            if one.failure is not None:
                yield told(
                    kinds.Dropped,
                    site=number,
                    candidate=one.index,
                    failure="load",
                    reason=one.failure,
                )
    yield meeting("vote")
    yield told(kinds.PhaseBegun, phase="race")
    yield meeting("rung 0")
    for number, each in enumerate(records):
        yield told(
            kinds.Ranked, site=number, n_left=24, best=each.winner, best_ms=each.best.latency_ms
        )
    yield told(kinds.PhaseBegun, phase="finals")
    yield meeting("round 0")
    yield told(kinds.PhaseBegun, phase="settle")
    for number, each in enumerate(records):
        won = {
            "winner": each.winner,
            "reason": "fastest step",
            "record_id": f"{number:06x}",
            "record": each.model_dump(mode="json"),
        }
        yield told(kinds.Won, 0.01, site=number, **won)
    seconds = {phase: value for phase, value in records[0].spent.model_dump().items() if value}
    yield told(kinds.TuningEnded, 0.1, seconds=seconds, n_replays=420, first_ms=2.31, best_ms=1.62)


def lines(told: Iterator[kinds.AnyEvent] | list[kinds.AnyEvent]) -> bytes:
    return b"".join(event.model_dump_json().encode() + b"\n" for event in told)


def write_story(
    folder: Path, n_sites: int = 2, n_candidates: int = 40, n_ranks: int = 4
) -> list[TuningRecord]:
    """The files of all ranks; returns the records of the sites."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [record(number, n_candidates, n_ranks) for number in range(n_sites)]
    for rank in range(n_ranks):
        (folder / f"rank-{rank}.jsonl").write_bytes(lines(events(records, rank, n_ranks)))
    return records
