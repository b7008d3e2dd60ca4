"""What the lines of a journal say of earlier attempts."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.records import Journal
from dist_tune.sites.restart import Attempts, read_attempts

pytestmark = pytest.mark.filterwarnings("ignore:journal")


def line(kind: str, **fields: Any) -> bytes:
    return json.dumps({"v": 2, "kind": kind, **fields}).encode()


ATTEMPT = line("attempt")
STACKS = [b"Stack (most recent call first):", b'  File "step.py", line 3 in step', b"  <no frame>"]


def under_way(*candidates: tuple[str, int]) -> bytes:
    return line("under way", candidates=candidates)


def read(*lines: bytes) -> dict[str, Attempts]:
    """What a restart finds in a file of these lines."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "one.jsonl"
        path.write_bytes(b"".join(each + b"\n" for each in lines))
        journal = Journal(path)
        journal.close()
    return read_attempts(journal.lines)


def deaths(*lines: bytes) -> dict[tuple[str, int], int]:
    return {(key, i): n for key, each in read(*lines).items() for i, n in each.deaths.items() if n}


def test_what_was_under_way_at_the_end_of_an_attempt_has_died():
    """Of several markers the last counts; an empty one clears it, and so do the stacks that SIGTERM
    leaves.
    """
    once = [ATTEMPT, under_way(("x", 3)), under_way(("x", 1))]
    assert deaths(*once) == {("x", 1): 1}
    assert deaths(*once, *once) == {("x", 1): 2}
    assert deaths(*once, b"", under_way()) == {}
    assert deaths(*once, *STACKS) == {}
    assert deaths(*once, *STACKS, *once) == {("x", 1): 1}
    assert deaths(*once, *STACKS, under_way(("x", 2))) == {("x", 2): 1}


def test_markers_nest():
    """A kernel inside a function has run: the function goes on."""
    assert deaths(
        ATTEMPT, under_way(("x", 0)), under_way(("x", 0), ("y", 5)), under_way(("x", 0))
    ) == {("x", 0): 1}
    assert deaths(ATTEMPT, under_way(("x", 0), ("y", 5))) == {("x", 0): 1, ("y", 5): 1}


def test_of_several_under_way_one_at_most_dies_a_second_time():
    """The one that was there before; with two of these neither."""
    first = [ATTEMPT, under_way(("x", 0), ("y", 5))]
    assert deaths(*first, ATTEMPT, under_way(("x", 0), ("y", 6))) == {
        ("x", 0): 2,
        ("y", 5): 1,
        ("y", 6): 1,
    }
    assert deaths(*first, ATTEMPT, under_way(("x", 0), ("y", 5))) == {("x", 0): 1, ("y", 5): 1}


def test_deaths_that_ranks_have_agreed_on_replace_one_s_own():
    """Those of another rank count here, too; 0 is one that is in quarantine, and may be let go."""
    assert deaths(ATTEMPT, line("died", site="x", deaths={1: 1})) == {("x", 1): 1}
    assert deaths(
        ATTEMPT, under_way(("x", 1)), ATTEMPT, line("died", site="x", deaths={1: 1, 2: 1})
    ) == {
        ("x", 1): 1,
        ("x", 2): 1,
    }
    assert (
        deaths(ATTEMPT, under_way(("x", 1)), ATTEMPT, line("died", site="x", deaths={1: 0})) == {}
    )


def test_agreed_times_and_failures_come_back():
    """The latest time of a candidate, also of one that was under way at a death; failures that only
    a run can find.
    """
    times = [
        line("agreed", site="x", times={1: [[ms, 2.0, 0.1], n]}) for ms, n in ((0.5, 1), (0.4, 3))
    ]
    failed = [
        line("dropped", site="x", candidate=i, failure=kind, reason="why")
        for i, kind in enumerate(("launch", "compile", "clock"))
    ]
    past = read(ATTEMPT, *times, *failed, under_way(("x", 1)))["x"]
    assert past.deaths == {1: 1}
    assert [
        (i, each.kernel_ms, each.closure_ms, each.n_replays) for i, each in past.times.items()
    ] == [(1, 0.4, 2.0, 3)]
    assert [*past.failures] == [0, 2]


LINES = st.one_of(
    st.binary(max_size=50),
    st.sampled_from(
        [
            ATTEMPT,
            under_way(),
            under_way(("x", 1)),
            under_way(("z", 1)),
            *STACKS,
        ]
    ),
    st.sampled_from(
        [
            line("agreed", site="x", times={-1: [[0.0, 1, 1], 1]}),
            line("died", site="x", deaths={"x": 1}),
            b"[" * 10_000,
            b"NaN",
        ]
    ),
)


@given(st.lists(LINES))
def test_any_lines_are_read(lines: list[bytes]):
    """In any order."""
    assert all(isinstance(each, Attempts) for each in read(*lines).values())


def test_a_damaged_line_ends_reading():
    """What stands before it counts."""
    assert deaths(ATTEMPT, under_way(("x", 1)), b'{"kind": "ag', ATTEMPT, under_way(("x", 1))) == {
        ("x", 1): 1
    }
