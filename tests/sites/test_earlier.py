"""What a journal says of earlier attempts, and what ranks go on from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache import JournalLine
from dist_tune.sites.earlier import past_of, shared_offer

pytestmark = pytest.mark.once

OPEN = {"t": "open"}


def lines(*events: dict[str, Any]) -> list[JournalLine]:
    return [JournalLine.model_validate(each) for each in events]


def begun(n: int, **on: int) -> dict[str, Any]:
    return {"t": "begun", "n": [n], "on": on}


def measured(n: int, **on: int) -> dict[str, Any]:
    launches = {label: [1.0] for label in on}
    return {"t": "measured", "n": [n], "on": on, "timed": [*on], "ms": 2.0, "launches_ms": launches}


def test_what_was_under_way_at_a_death_is_a_suspect_and_after_two_out():
    """With what it had measured before forgotten; others keep theirs."""
    once = [OPEN, begun(1, s=0), measured(1, s=0), begun(2, s=1), measured(2, s=1), begun(3, s=1)]
    past = past_of(lines(*once))
    assert past.suspects == {("s", 1)}
    assert past.strikes == {("s", 1): 1}
    assert [(key, len(each)) for key, each in past.samples.items()] == [(("s", 0, False), 1)]
    assert past_of(lines(*once, OPEN, begun(1, s=1))).strikes["s", 1] == 2


def test_a_death_on_another_rank_is_the_first_one_here():
    """It counts once however often it is told, and is no suspicion any more once the candidate was timed."""
    site, told = {"t": "site", "label": "s", "key": "a"}, {"t": "suspected", "label": "s", "n": [1, 3]}
    first = [OPEN, site, begun(1, s=1), measured(1, s=1), OPEN, site, told, OPEN, site, told]
    past = past_of(lines(*first))
    assert (past.suspects, past.strikes["s", 1]) == ({("s", 1), ("s", 3)}, 1)
    assert past_of(lines(*first, begun(2, s=1))).strikes["s", 1] == 2
    past = past_of(lines(*first, begun(2, s=1), measured(2, s=1)))
    assert (past.suspects, past.strikes["s", 1]) == ({("s", 3)}, 1)


def test_deaths_under_two_names_of_one_site_are_two():
    """A kernel that is the first of its name has a longer label once another one is met: its first death was under the shorter one."""
    short, long, other = ({"t": "site", "label": label, "key": key} for label, key in (("s", "a"), ("s{0}", "a"), ("s{1}", "b")))
    first = [OPEN, short, begun(1, s=0)]
    assert past_of(lines(*first, OPEN, short, long, other)).suspects == {("s", 0), ("s{0}", 0)}
    dies = begun(2, **{"s{0}": 0, "s{1}": 3})
    past = past_of(lines(*first, OPEN, short, long, other, dies))
    assert past.strikes == {("s", 0): 2, ("s{0}", 0): 2, ("s{1}", 3): 1}
    times = measured(2, **{"s{0}": 0})
    past = past_of(lines(*first, OPEN, short, long, other, times, OPEN, short, long, other))
    assert past.suspects == set()
    assert past_of(lines(OPEN, short, long, times, *first)).samples == {}
    cleared = past_of(lines(*first, OPEN, short, long, dies, OPEN, {"t": "quarantined", "label": "s", "n": [0]}, short, long))
    assert {pair for pair, n in cleared.strikes.items() if n} == {("s{1}", 3)}


def test_a_suspect_that_was_timed_alone_counts_again():
    """Its death is remembered."""
    past = past_of(lines(OPEN, begun(1, s=1), OPEN, begun(1, s=1), measured(1, s=1), begun(2, s=2)))
    assert past.suspects == {("s", 2)}
    assert past.strikes == {("s", 1): 1, ("s", 2): 1}
    assert ("s", 1, False) in past.samples


def test_of_several_under_way_one_at_most_gets_a_second_strike():
    """The one that was there before; with two of these neither."""
    first = [OPEN, begun(1, s=0, t=5)]
    assert past_of(lines(*first, OPEN, begun(1, s=0, t=6))).strikes == {("s", 0): 2, ("t", 5): 1, ("t", 6): 1}
    assert past_of(lines(*first, OPEN, begun(1, s=0, t=5))).strikes == {("s", 0): 1, ("t", 5): 1}


def test_what_was_measured_of_other_candidates_is_forgotten():
    """A site that comes back with another key has other candidates: neither samples, nor strikes, nor finals beside it count any more."""
    first = [
        OPEN,
        *({"t": "site", "label": label, "key": key} for label, key in ("sa", "tc")),
        measured(1, s=0, t=1),
        measured(2, s=1, t=0),
    ]
    finals = {**measured(3, s=1, t=1), "is_final": True}
    failed = {"t": "dropped", "label": "t", "n": [2], "kind": "launch", "reason": "once"}
    both = past_of(lines(*first, finals, failed, begun(4, t=3)))
    assert {label for label, _, _ in both.samples} == {"s", "t"}
    again = [OPEN, {"t": "site", "label": "s", "key": "a"}, {"t": "site", "label": "t", "key": "b"}]
    past = past_of(lines(*first, finals, failed, begun(4, t=3), *again))
    assert past.keys == {"s": "a", "t": "b"}
    assert set(past.samples) == {("s", 0, False), ("s", 1, False)}
    assert (past.failures, past.suspects, past.strikes["t", 3]) == ({}, set(), 0)
    past.forget("s")
    assert not past.samples


@pytest.mark.parametrize("end", [{"t": "stop"}, {"t": "ran", "n": [1]}])
def test_an_interruption_casts_no_suspicion(end: dict[str, Any]):
    assert past_of(lines(OPEN, begun(1, s=0), end)).suspects == set()


def test_a_replay_that_was_struck_out_counts_in_its_own_attempt_only():
    """The number belongs to another replay in the next attempt."""
    past = past_of(lines(OPEN, measured(1, s=0), {"t": "struck", "n": [1]}, OPEN, measured(1, s=0)))
    assert [len(each) for each in past.samples.values()] == [1]


def test_ranks_go_on_from_what_all_of_them_have():
    """A rank that did not meet a site has nothing to say about it."""
    mine = ({"s", "t"}, {"s": {0: [2, 1], 1: [1, 0], 2: [1, 0]}, "t": {0: [1, 0]}})
    theirs = ({"s"}, {"s": {0: [1, 2], 2: [1, 0]}})
    assert shared_offer([mine, theirs], {"s": {2}}) == {"s": {0: [1, 1]}, "t": {0: [1, 0]}}
    assert shared_offer([mine, ({"s", "t"}, {})], {}) == {}


EVENTS = st.sampled_from(["open", "site", "begun", "ran", "measured", "struck", "dropped", "quarantined", "stop", "phase"])


@given(st.lists(st.tuples(EVENTS, st.integers(0, 3), st.integers(0, 3), st.sampled_from(["s", "t"]))))
def test_any_valid_lines_are_read(events: list[tuple[str, int, int, str]]):
    """In any order: a journal may have lost lines anywhere."""
    made = [
        {"t": t, "n": [n], "label": label, "on": {label: i}, "timed": [label], "ms": 1.0, "kind": "launch", "reason": "why"}
        for t, n, i, label in events
    ]
    past = past_of(lines(*made))
    assert all(n >= 0 for n in past.strikes.values())


def test_a_death_of_a_candidate_that_ran_alone_is_enough():
    """One that was under way beside it, or before it in the same attempt, has no strike for that."""
    alone = begun(2, s=1) | {"is_alone": True}
    past = past_of(lines(OPEN, begun(1, s=0), {"t": "ran", "n": [1]}, alone))
    assert past.strikes == {("s", 1): 2}
    assert past_of(lines(OPEN, alone, {"t": "ran", "n": [2]}, begun(3, s=2))).strikes == {("s", 2): 1}
    assert past_of(lines(OPEN, alone, {"t": "stop"})).strikes == {}
