"""Records of finished tunings, as values and as JSON."""

import json
import platform
from typing import Any

import pytest
import torch
import triton
from pydantic import ValidationError

from dist_tune import records
from dist_tune.records import SCHEMA_VERSION, CandidateRecord, Seconds, TuningRecord, environment


def record(**changes: Any) -> TuningRecord:
    measured = CandidateRecord(
        index=1, config="B=32", fields={"B": 32, "FAST": True, "SCALE": 0.5, "MODE": "x", "NONE": None}, latency_ms=0.1, spread_ms=0.01,
        closure_ms=0.3, rank_latencies_ms={0: 0.1, 3: 0.05}, shared_bytes=1024, n_regs=64, n_spills=0,
    )  # fmt: skip
    dropped = CandidateRecord(index=0, config="B=16", fields={"B": 16}, failure="rank 1: OutOfResources")
    values: dict[str, Any] = {
        "closure": "f", "kernel": "gemm", "key": "[64]", "winner": 1, "candidates": [dropped, measured], "n_replays": 9, "seconds": 1.5,
        "spent": Seconds(total=1.5, race=1.0), "environment": environment(world_size=2),
    }  # fmt: skip
    return TuningRecord(**{**values, **changes})


def test_a_record_reads_back_equal():
    """Through JSON: ranks are ints again, what was not measured is None, and the version is there."""
    text = record().model_dump_json()
    assert TuningRecord.model_validate_json(text) == record()
    assert TuningRecord.model_validate_json(text).best.rank_latencies_ms == {0: 0.1, 3: 0.05}
    assert json.loads(text)["schema_version"] == SCHEMA_VERSION == 2


def test_best_is_the_winner():
    """The winner is an index, not a place in an order by time."""
    assert record().best.config == "B=32"
    assert record(winner=0).best.failure == "rank 1: OutOfResources"


@pytest.mark.parametrize("field", ["winner", "seconds", "environment"])
def test_a_record_does_not_change(field: str):
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record(), field, None)


def test_a_record_lacks_nothing():
    """A file that misses a field is refused, not filled up."""
    values = json.loads(record().model_dump_json())
    for name in ("winner", "candidates", "spent", "environment"):
        with pytest.raises(ValidationError, match=name):
            TuningRecord.model_validate({key: value for key, value in values.items() if key != name})


def test_the_environment_is_this_process(monkeypatch: pytest.MonkeyPatch):
    """Versions as the packages say; a build without metadata is no error."""
    here = environment(world_size=4)
    assert (here.world_size, here.python, here.torch, here.triton) == (4, platform.python_version(), torch.__version__, triton.__version__)
    assert (here.cuda, bool(here.device)) == (torch.version.cuda, True)
    assert records._version("no-such-package-here") == "unknown"
