"""What a rank that waits makes of what missing ranks say of themselves: pure, with plain values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.distributed.calls import Call, Card, Limits, Peer, Place, has_passed

pytestmark = pytest.mark.once

DEADLINE_S, GATHER_S = 4.0, 60.0
CALL = Call(Place("f", 3, before=10), has_talked=False, n_issued=10)
TALKED = Call(Place("f", 3, before=10), has_talked=True, n_issued=12)
MINE = Card("", 10, {"f": 3}, [CALL.place])


def card(
    n_calls: int = 2, inside: Place | None = None, n_issued: int = 10, *, for_s: float = 0.0, may_last: bool = False, is_over: bool = False
) -> Card:
    """What a rank says that is in this call of "f", if in any."""
    places = [inside] if inside is not None else []
    return Card("p", n_issued, {"f": n_calls}, places, "replay", for_s, may_last, is_over=is_over)


def test_keys_of_a_call_are_those_of_its_collectives_where_it_has_some():
    """All ranks have issued as many before it, however they count it; a call without has its number."""
    assert (CALL.key, TALKED.key) == ("f/n3", "f/c10")
    assert TALKED._replace(place=Place("f", 7, before=10)).key == TALKED.key


@pytest.mark.parametrize(
    ("call", "other", "passed"),
    [
        (CALL, card(2), False),
        (CALL, card(3), True),
        (CALL, card(3, CALL.place), False),
        (CALL, card(4, Place("f", 4, 10)), True),
        (CALL, card(3, Place("f", 3, 9)), False),
        (TALKED, card(3, Place("f", 3, 10), n_issued=14), False),
        (CALL, card(3, CALL.place, n_issued=11), True),
        (CALL, card(0, n_issued=11), True),
        (TALKED, card(3, n_issued=11), True),
        (TALKED, card(3, n_issued=12), True),
        (TALKED, card(2, n_issued=12), False),
        (TALKED, card(9, Place("f", 9, 10), n_issued=12), False),
        (TALKED, card(9, Place("f", 9, 12), n_issued=12), True),
        (TALKED, card(1, n_issued=13), True),
    ],
)
def test_who_has_passed_a_call(call: Call, other: Card, passed: bool):
    """By its number, and not while it is inside; by collectives, which take all ranks, whatever the numbers are."""
    assert has_passed(call, other) is passed


HERE = CALL.place
ELSEWHERE = Call(Place("g", 1, 10), has_talked=False, n_issued=10)
WAITS_ELSEWHERE = Card("p", 10, {"f": 2, "g": 1}, [ELSEWHERE.place], "the meeting", waits=ELSEWHERE)


@pytest.mark.parametrize(
    ("peer", "waited_s", "gathered", "reduced"),
    [
        (Peer(None), 1.0, "", ""),
        (Peer(None), 5.0, "", "timed out"),
        (Peer(None), 61.0, "timed out", "timed out"),
        (Peer(card(2)), 5.0, "", "timed out"),
        (Peer(card(3)), 0.0, "alone", ""),
        (Peer(card(3, HERE)), 0.0, "", ""),
        (Peer(card(3, HERE, for_s=9.0)), 0.0, "", "timed out"),
        (Peer(card(3, HERE, for_s=99.0, may_last=True)), 0.0, "", ""),
        (Peer(card(2), silent_s=9.0), 0.0, "alone", "timed out"),
        (Peer(card(3, HERE), silent_s=5.0), 0.0, "alone", ""),
        (Peer(card(3, HERE), silent_s=9.0, state=""), 0.0, "alone", "timed out"),
        (Peer(card(3, HERE), silent_s=9.0, state="runs"), 0.0, "", "timed out"),
        (Peer(card(3, HERE, for_s=9.0), silent_s=9.0, state="stopped"), 0.0, "", ""),
        (Peer(card(2), state="gone"), 0.0, "alone", "timed out"),
        (Peer(card(3, HERE), state="gone"), 0.0, "timed out", "timed out"),
        (Peer(card(2, is_over=True), state="gone"), 0.0, "alone", "timed out"),
        (Peer(WAITS_ELSEWHERE, is_fresh=True), 0.0, "crossed", "crossed"),
        (Peer(WAITS_ELSEWHERE), 0.0, "", ""),
    ],
)
def test_what_a_wait_comes_to(peer: Peer, waited_s: float, gathered: str, reduced: str):
    """In the first meeting of a call, which others may have passed, and in a later one, where all ranks tune."""
    for is_gathering, outcome in ((True, gathered), (False, reduced)):
        limits = Limits(DEADLINE_S, GATHER_S, is_first=True, is_gathering=is_gathering)
        assert limits.outcome(CALL, MINE, {1: peer}, waited_s)[0] == outcome


def test_a_rank_with_nothing_to_tune_waits_for_the_deadline_and_goes_on_alone():
    limits = Limits(DEADLINE_S, GATHER_S, is_first=True, is_gathering=True, is_optional=True)
    assert limits.outcome(CALL, MINE, {1: Peer(card(2))}, 3.9)[0] == ""
    assert limits.outcome(CALL, MINE, {1: Peer(card(2))}, 4.0) == ("alone", [1])


def test_after_a_failed_collective_a_stopped_rank_is_not_waited_for():
    stopped = Peer(card(3, HERE), silent_s=5.0, state="stopped")
    assert Limits(DEADLINE_S, GATHER_S).outcome(CALL, MINE, {1: stopped}, 0.0)[0] == ""
    assert Limits(DEADLINE_S, GATHER_S, is_broken=True).outcome(CALL, MINE, {1: stopped}, 0.0)[0] == "timed out"


PLACES = st.builds(Place, st.sampled_from(["f", "g"]), st.integers(1, 3), st.integers(0, 3))
CALLS = st.builds(lambda place, n: Call(place, n > 0, place.before + n), PLACES, st.integers(0, 2))


@given(CALLS, CALLS)
def test_of_two_ranks_that_wait_at_least_one_is_told(mine: Call, theirs: Call):
    """Each in the first meeting of its call: they are in one call, or one has passed the other's, or both learn that they differ."""
    if mine.holds(theirs.place) and theirs.holds(mine.place) and mine.key == theirs.key:
        return
    limits, outcomes = Limits(DEADLINE_S, GATHER_S, is_first=True, is_gathering=True), []
    cards = [
        Card("p", call.n_issued, {call.place.closure: call.place.number}, [call.place], "the meeting", waits=call)
        for call in (mine, theirs)
    ]
    for call, own, other in ((mine, cards[0], cards[1]), (theirs, cards[1], cards[0])):
        outcomes.append(limits.outcome(call, own, {1: Peer(other, is_fresh=True)}, 0.0)[0])
    assert any(outcomes), (mine, theirs)
