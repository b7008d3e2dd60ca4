"""What a rank that waits makes of what missing ranks say of themselves: pure, with plain values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.ranks.calls import Call, Card, Limits, Place, has_passed

DEADLINE_S, GATHER_S = 4.0, 60.0
HERE = Place("f", 3, before=10)
CALL, TALKED = Call(HERE, has_talked=False, n_issued=10), Call(HERE, has_talked=True, n_issued=12)
OTHER = Call(Place("g", 1, 10), has_talked=False, n_issued=10)


def card(n_calls: int = 2, inside: Place | None = None, n_issued: int = 10, **seen: object) -> Card:
    """What a rank says that is in this call of "f", if in any; and how it is seen."""
    return Card(
        0,
        "p",
        n_issued,
        n_calls={"f": n_calls},
        inside=[] if inside is None else [inside],
        doing="replay",
        **seen,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("call", "other", "passed"),
    [
        (CALL, card(2), False),
        (CALL, card(3), True),
        (CALL, card(3, HERE), False),
        (CALL, card(4, Place("f", 4, 10)), True),
        (CALL, card(3, Place("f", 3, 9)), False),
        (TALKED, card(3, HERE, n_issued=14), False),
        (CALL, card(3, HERE, n_issued=11), True),
        (CALL, card(0, n_issued=11), True),
        (TALKED, card(3, n_issued=11), True),
        (TALKED, card(2, n_issued=12), False),
        (TALKED, card(9, Place("f", 9, 10), n_issued=12), False),
        (TALKED, card(9, Place("f", 9, 12), n_issued=12), True),
        (TALKED, card(1, n_issued=13), True),
    ],
)
def test_who_has_passed_a_call(call: Call, other: Card, passed: bool):
    """By its number, and not while it is inside; by collectives, which take all ranks, whatever the
    numbers are.
    """
    assert (CALL.key, TALKED.key, TALKED._replace(place=Place("f", 7, before=10)).key) == (
        "f/n3",
        "f/c10",
        "f/c10",
    )
    assert has_passed(call, other) is passed


ELSEWHERE = Card(0, "p", 10, n_calls={"f": 2, "g": 1}, inside=[OTHER.place], waits=OTHER)
FRESH = Card(0, "p", 10, n_calls={"f": 2, "g": 1}, inside=[OTHER.place], waits=OTHER, is_fresh=True)


@pytest.mark.parametrize(
    ("other", "waited_s", "gathered", "visited", "reduced", "broken"),
    [
        # a first meeting, with something to tune and with nothing; a later one, and one after a
        # failed collective
        (Card(), 0.9, "", "", "", ""),
        (Card(), 3.9, "", "", "", "timed out"),
        (Card(), 5.0, "", "alone", "timed out", "timed out"),
        (Card(), 61.0, "timed out", "alone", "timed out", "timed out"),
        (card(2), 5.0, "", "alone", "timed out", "timed out"),
        (card(3), 0.0, "alone", "alone", "", ""),
        (card(3, HERE), 0.0, "", "", "", ""),
        (card(3, HERE, for_s=9.0), 0.0, "", "", "", ""),
        (card(3, HERE, for_s=9.0, is_fresh=True), 0.0, "", "", "timed out", "timed out"),
        (card(3, HERE, for_s=99.0, may_last=True), 0.0, "", "", "", ""),
        (card(2, silent_s=9.0), 0.0, "alone", "alone", "timed out", "timed out"),
        (card(3, HERE, silent_s=5.0), 0.0, "alone", "alone", "", "timed out"),
        (card(3, HERE, silent_s=9.0), 0.0, "alone", "alone", "timed out", "timed out"),
        (card(3, HERE, silent_s=9.0, state="runs"), 0.0, "", "", "timed out", "timed out"),
        (card(3, HERE, for_s=9.0, silent_s=9.0, state="stopped"), 0.0, "", "", "", "timed out"),
        (card(2, state="gone"), 0.0, "alone", "alone", "timed out", "timed out"),
        (card(3, HERE, state="gone"), 0.0, "timed out", "timed out", "timed out", "timed out"),
        (card(2, is_over=True, state="gone"), 0.0, "alone", "alone", "timed out", "timed out"),
        (FRESH, 0.0, "crossed", "crossed", "crossed", "crossed"),
        (ELSEWHERE, 0.0, "", "", "", ""),
    ],
)
def test_what_a_wait_comes_to(
    other: Card, waited_s: float, gathered: str, visited: str, reduced: str, broken: str
):
    """The table of docs/how-it-works.md."""
    mine = Card(0, "p", 10, n_calls={"f": 3}, inside=[HERE], for_s=waited_s)
    for options, outcome in (
        ({"is_gathering": True}, gathered),
        ({"is_gathering": True, "is_optional": True}, visited),
        ({}, reduced),
        ({"is_broken": True}, broken),
    ):
        assert (
            Limits(DEADLINE_S, GATHER_S, is_first=True, **options).outcome(
                CALL, mine, {1: other}, waited_s
            )[0]
            == outcome
        ), options


def test_a_rank_that_never_came_is_given_up_while_others_are_in_the_collective_that_failed():
    """Gloo tells only the neighbours of a process that has ended; the others wait in that
    collective, until these are gone, too.
    """
    mine, missing = (
        Card(0, "p", 10, inside=[HERE], for_s=1.5),
        {1: Card(), 3: card(3, HERE, for_s=9.0, may_last=True)},
    )
    assert Limits(DEADLINE_S, GATHER_S, is_first=True, is_broken=True).outcome(
        CALL, mine, missing, 0.0
    ) == ("timed out", [1])


def test_ranks_that_fell_silent_together_are_named_together():
    """Those of a host that is cut off, of which one had answered a moment longer; not one that
    answers, and has yet to come.
    """
    missing = {1: card(3, HERE, silent_s=8.1), 2: card(3, HERE, silent_s=7.8), 3: card(3, HERE)}
    assert Limits(DEADLINE_S, GATHER_S).outcome(CALL, Card(), missing, 0.0) == ("timed out", [1, 2])


PLACES = st.builds(Place, st.sampled_from(["f", "g"]), st.integers(1, 3), st.integers(0, 3))
CALLS = st.builds(lambda place, n: Call(place, n > 0, place.before + n), PLACES, st.integers(0, 2))


@given(CALLS, CALLS)
def test_of_two_ranks_that_wait_at_least_one_is_told(mine: Call, theirs: Call):
    """Each in the first meeting of its call: they are in one call, or one has passed the other's,
    or both learn that they differ.
    """
    if mine.holds(theirs.place) and theirs.holds(mine.place) and mine.key == theirs.key:
        return
    limits = Limits(DEADLINE_S, GATHER_S, is_first=True, is_gathering=True)
    one, other = (
        Card(
            0,
            "p",
            each.n_issued,
            n_calls={each.place.closure: each.place.number},
            inside=[each.place],
            waits=each,
            is_fresh=True,
        )
        for each in (mine, theirs)
    )
    assert any(
        (
            limits.outcome(mine, one, {1: other}, 0.0)[0],
            limits.outcome(theirs, other, {0: one}, 0.0)[0],
        )
    ), (mine, theirs)
