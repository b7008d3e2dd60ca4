"""Records of finished tunings, as values and as JSON."""

import json
import math
import platform
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dist_tune.records import (
    CandidateRecord,
    Environment,
    Seconds,
    TuningRecord,
    digest,
    environment,
    record_bytes,
    record_in,
)
from tests.cached_records import candidate, record

TEXTS = st.text(max_size=40) | st.sampled_from(
    ["\\", '"', '":', "}\n}\n", "\x00\x1b[31m\x7f", "日本\U0001f600", "x" * 10_000]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [5e-324, -0.0, 1.7976931348623157e308, 0.1 + 0.2]
)
TIMES_MS = st.none() | FLOATS.map(abs)
COUNTS = st.integers() | st.integers(-(10**400), 10**400)
SCALARS = st.none() | st.booleans() | COUNTS | FLOATS | TEXTS
ZONES = st.just(UTC) | st.integers(-14 * 60, 14 * 60).map(
    lambda minutes: timezone(timedelta(minutes=minutes))
)


def candidates(index: int) -> st.SearchStrategy[CandidateRecord]:
    return st.builds(
        CandidateRecord,
        index=st.just(index),
        config=TEXTS,
        fields=st.dictionaries(TEXTS, SCALARS, max_size=4),
        latency_ms=TIMES_MS,
        closure_ms=st.none() | FLOATS,
        n_replays=COUNTS,
        rank_latencies_ms=st.dictionaries(COUNTS, FLOATS.map(abs), max_size=3),
        failure=st.none() | TEXTS if index else st.none(),
        left=st.none() | TEXTS,
    )


RECORDS = st.builds(
    TuningRecord,
    closure=TEXTS,
    kernel=TEXTS,
    key=TEXTS,
    source=TEXTS,
    winner=st.just(0),
    n_replays=COUNTS,
    closure_weight=FLOATS,
    candidates=st.integers(1, 3).flatmap(lambda n: st.tuples(*map(candidates, range(n))).map(list)),
    seconds=FLOATS,
    spent=st.builds(Seconds, total=FLOATS),
    meeting_seconds=st.lists(FLOATS, max_size=3),
    environment=st.builds(
        Environment,
        device=TEXTS,
        device_count=COUNTS,
        world_size=COUNTS,
        torch=TEXTS,
        cuda=st.none() | TEXTS,
    ),
    tuned_at=st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29), timezones=ZONES),
)


@given(RECORDS)
def test_what_is_written_comes_out_equal(whole: TuningRecord):
    """Any text, any size of number and any time zone; on one line, and JSON as others know it."""
    content = record_bytes(whole)
    assert record_in(content) == whole
    assert b"\n" not in content
    assert json.loads(content)["schema_version"] == 4


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            {"candidates": [candidate(0), candidate(1, failure="no")]},
            "winner 1 is no candidate that runs",
        ),
        *(({"winner": winner}, f"winner {winner} is no candidate") for winner in (3, -1)),
        ({"candidates": []}, "winner 1 is no candidate"),
        ({"schema_version": 3}, "schema_version"),
        ({"seconds": math.nan}, "finite"),
        ({"tuned_at": datetime(2026, 3, 1)}, "timezone"),
        ({"guess": 1}, "guess"),
        ({"candidates": [{**dict(candidate(0)), "latency_ms": -1.0}]}, "latency_ms"),
    ],
)
def test_what_makes_no_sense_is_no_record(changes: dict[str, Any], word: str):
    """A winner that failed or is not there, another schema, no number, no time zone, more
    fields.
    """
    with pytest.raises(ValidationError, match=word):
        record(**changes)


def test_the_key_is_of_what_was_asked_for():
    """Name, code, tuning key, candidates in their order, and of the environment what times depend
    on; not what came of them.

    The environment is this process's: versions as the packages say, of Python the first two
    numbers.
    """
    here = environment(world_size=2, ranks_per_host=1)
    assert (here.torch, here.triton, here.cuda) == (
        torch.__version__,
        triton.__version__,
        torch.version.cuda,
    )
    assert platform.python_version().startswith(f"{here.python}.")
    assert (bool(here.device), here.device_count) == (True, torch.cuda.device_count())
    key = record(environment=here).cache_key
    assert (key.name, key.source, key.world_size, key.torch) == (
        "model.gemm",
        "0123456789abcdef",
        2,
        torch.__version__,
    )
    assert key.candidates == digest([each.config for each in record().candidates])
    assert (
        record(winner=2, n_replays=1, closure="g", seconds=9.0, environment=here).cache_key == key
    )
    # Another node, or an upgrade of Python.
    for changes in ({"python": "2.7"}, {"device_count": 99}):
        assert record(environment=here.model_copy(update=changes)).cache_key == key


def test_what_follows_from_a_record():
    """Equal candidates are counted once, one sample has no spread, and whether it came from the
    cache is of this call alone.
    """
    first, second, third = record().candidates
    assert record().n_samples == 15
    assert (
        record(candidates=[first, second, third.model_copy(update={"equal_to": 1})]).n_samples == 10
    )
    assert [candidate(0, n_replays=n, spread_ms=0.0).known_spread_ms for n in (1, 2)] == [None, 0.0]
    assert "is_recalled" not in json.loads(record(is_recalled=True).model_dump_json())
    assert record(is_recalled=True).cache_key == record().cache_key
