"""Reasons behind a record's choice, in words and counts."""

from __future__ import annotations

from typing import Any

import pytest

from dist_tune.records.account import (
    confidence,
    facts,
    fates,
    gain,
    lead,
    short_config,
    slowest_rank,
    weighing,
    why_not,
)
from dist_tune.search import NOT_TRIED
from tests.cached_records import candidate, record


def of(*rows: dict[str, Any], winner: int = 0, weight: float = 1.0, reason: str = "") -> Any:
    """A record of candidates without noise; a row holds what is said of one.

    ``weight``: of the step's time.
    """
    plain = {"spread_ms": 0.0, "left": None}
    return record(
        candidates=[candidate(i, **{**plain, **each}) for i, each in enumerate(rows)],
        winner=winner,
        closure_weight=weight,
        reason=reason,
    )


def timed(kernel_ms: float, step_ms: float, **changes: Any) -> dict[str, Any]:
    return {"latency_ms": kernel_ms, "closure_ms": step_ms, **changes}


UNTIMED: dict[str, Any] = {
    "latency_ms": None,
    "closure_ms": None,
    "spread_ms": None,
    "rank_latencies_ms": {},
}


LEADS: dict[str, Any] = {
    "10.0 % ahead of the next, 5.0 x the noise": ((1.1, 1.0, 1.5), 1),
    "1.0 % ahead of the next, within the noise (2.0 %)": ((1.0, 1.01), 0),
    "50.0 % behind the fastest kernel, 50.0 x the noise": ((1.0, 2.0), 1),  # a winner by its step
    "nothing to compare with": ((1.0, None), 0),
}


@pytest.mark.parametrize("words", LEADS)
def test_a_lead_is_told_beside_the_noise(words: str):
    """Both as shares of the winner's time; the noise is the spreads of the winner and of the
    fastest other, added: 0.02 ms here.
    """
    times, winner = LEADS[words]
    rows = [
        timed(ms, 2.0, spread_ms=0.01) if ms is not None else {**UNTIMED, "failure": "no"}
        for ms in times
    ]
    assert confidence(of(*rows, winner=winner)) == words


def test_gain_is_a_share_of_the_winners_time():
    assert gain(of(timed(2.0, 3.0), timed(1.0, 2.0), timed(1.1, 2.2), winner=1)) == 2.0
    assert (gain(of(UNTIMED)), lead(of(UNTIMED))) == (None, None)


def test_what_there_is_not_has_no_heading():
    """All of a site that was measured; of the only candidate, which was not, its config."""
    full = facts(record())
    assert full.pop("measured").startswith("kernel 1.100 ms, step 1.300 ms, ")
    assert list(full) == [
        "winner",
        "chosen",
        "weight of the step",
        "candidates",
        "slowest rank",
        "all with",
    ]
    assert list(facts(of(UNTIMED))) == ["winner", "measured", "chosen", "candidates"]


def test_each_candidate_has_one_fate():
    """Their numbers sum up to all candidates, and failures are counted by cause."""
    rows = [
        timed(1.0, 2.0),
        timed(1.1, 2.1),
        timed(2.0, 3.0, left="left the race after round 1"),
        {**UNTIMED, "left": NOT_TRIED},
        UNTIMED,
        timed(1.0, 2.0, equal_to=0),
        {"failure": "rank 1: needs 9 bytes of shared memory"},
        {"failure": "rank 0: ValueError: no"},
        {
            "failure": "the same kernel as candidate 6: rank 1: needs 9 bytes of shared memory",
            "equal_to": 6,
        },
    ]
    told = "8 tried: 2 in the finals, 1 raced out, 1 not timed, 1 the same kernel as another"
    assert (
        fates(of(*rows)) == f"{told}, 3 cannot run here (2 shared memory, 1 ValueError), 1 untried"
    )
    # What never ran is not raced out: the budget was spent before its turn, or no replay met the
    # site in time.
    spent, missed = (
        {**UNTIMED, "left": left}
        for left in ("not raced: the budget of 1 s was spent", "was not met in time to be measured")
    )
    rows = [
        timed(1.0, 2.0),
        spent,
        missed,
        timed(1.1, 2.0, left="not raced: slower in an earlier tuning"),
    ]
    assert fates(of(*rows)) == "2 tried: 1 timed, 1 not timed, 2 not raced"
    # An exhaustive search has no finals.
    assert fates(of(timed(1.0, 2.0), timed(1.1, 2.1))) == "2 tried: 2 timed"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("rank 3: OutOfResources: out of resource: shared memory, Required: 1", "shared memory"),
        ("rank 0: the result is wrong: 3 of 4 values differ", "wrong result"),
        (
            "rank 0: it did not return until release= was called, after 1.0 s (race)",
            "did not return",
        ),
        ("rank 0: the process ended 2 times while this config ran", "ended the process"),
        ("rank 1: 2.00 s a launch, where rank 0 needs 0.1 s", "slow on one rank"),
        ("rank 0: CompilationError: at 3:4", "CompilationError"),
        ("rank 0: ???", "other reasons"),
    ],
)
def test_a_failure_has_a_cause_of_few_words(failure: str, words: str):
    assert (
        fates(of(timed(1.0, 2.0), {"failure": failure}))
        == f"2 tried: 1 timed, 1 cannot run here ({words})"
    )


def test_a_step_that_varies_by_itself_says_how_far_it_counted():
    """So that the differences which decided can be found in the table; nothing of it with one
    finalist, or where all counted.
    """
    finals = timed(1.0, 2.0), timed(1.1, 2.1)
    told = "the step's time weighs 25 % beside the kernel's, because the step varies by itself"
    assert weighing(of(*finals).model_copy(update={"closure_weight": 0.25})) == told
    assert weighing(of(*finals).model_copy(update={"closure_weight": 1.0})) == ""
    assert weighing(of(finals[0], UNTIMED).model_copy(update={"closure_weight": 0.25})) == ""


def test_no_candidate_is_out_without_a_reason():
    """A finalist, too, says by how much it lost; of the winner the reason is told as it was
    stored.
    """
    equal = timed(1.1, 2.1, equal_to=1)
    found = of(
        timed(1.0, 2.0),
        timed(1.1, 2.1),
        timed(1.001, 2.001),
        UNTIMED,
        equal,
        reason="tied within noise",
    )
    assert [why_not(each, found) for each in found.candidates] == [
        "winner: tied within noise",
        "not chosen: +10.0% by its kernel, +0.1000 ms by the step",
        "not chosen: +0.1% by its kernel, +0.0010 ms by the step",
        "not measured on all ranks",
        "the same kernel as candidate 1",
    ]


def test_the_slowest_rank_is_compared_with_the_fastest():
    """Of several sites by the sum of their winners; nothing with one rank, or where all are alike
    within 1 %.
    """
    one, other = (
        of(timed(1.0, 2.0, rank_latencies_ms={0: 1.0, 7: ms, 2: 1.1})) for ms in (1.25, 1.05)
    )
    assert (slowest_rank([one]), slowest_rank([one, other])) == ("rank 7 (+25 %)", "rank 7 (+15 %)")
    assert [
        slowest_rank([of(timed(1.0, 2.0, rank_latencies_ms=each))])
        for each in ({0: 1.0}, {0: 1.0, 1: 1.009})
    ] == ["", ""]


def test_a_config_is_short():
    """The config without its hook; a number that tells equal ones apart stays."""
    hooked = candidate(
        0,
        config="B=1 num_warps=4 pre_hook=m.f (#2)",
        fields={"B": 1, "num_warps": 4, "pre_hook": "m.f"},
    )
    assert short_config(hooked) == "B=1 num_warps=4 (#2)"
    assert short_config(candidate(0, config="B=1 pre_hook=m.<locals>.f", fields={})) == "B=1"
