"""Numbers of calls: who has passed a call, who is in it, and that ranks in different calls are told apart."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.distributed.protocol.calls import (
    ISSUED,
    Calls,
    CallsByGroup,
    Passed,
    Place,
    ahead,
    all_passed,
    calls_of,
    is_apart,
    is_inside,
    is_one_call,
    raised_in,
)

pytestmark = pytest.mark.once


def standing(calls: Calls) -> list[int]:
    """The calls as a rank tells them to its peers."""
    return [calls.n_calls, *calls.under_way]


def test_a_call_is_under_way_until_it_is_over():
    """Its number is one more than that of the call before, and it is passed when it has ended."""
    calls = Calls(n_calls=3)
    with calls.one() as number:
        assert (number, standing(calls)) == (4, [4, 4])
        assert ahead(Place("f", 4), {1: {"f": standing(calls)}}) == []
    assert ahead(Place("f", 4), {1: {"f": standing(calls)}}) == [1]


def test_a_call_that_raises_is_over():
    """No peer waits for it any more."""
    calls = Calls()
    with pytest.raises(ValueError, match="of the step"), calls.one():
        raise ValueError("of the step")
    assert standing(calls) == [1]


def test_a_call_around_another_one_is_not_passed():
    """The inner call of the same name has its own number; the outer one is still under way when the inner one is over."""
    calls = Calls()
    with calls.one() as outer:
        with calls.one() as inner:
            assert (outer, inner, standing(calls)) == (1, 2, [2, 1, 2])
        passed = {1: {"f": standing(calls)}}
        assert ahead(Place("f", outer), passed) == []
        assert ahead(Place("f", inner), passed) == [1]
    assert standing(calls) == [2]


def test_calls_in_any_order_of_ends():
    """Threads end their calls in any order; each removes its own."""
    calls = Calls()
    first, second = calls.one(), calls.one()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert standing(calls) == [2, 2]
    second.__exit__(None, None, None)
    assert standing(calls) == [2]


def test_a_rank_behind_or_in_another_closure_has_passed_nothing():
    """One that has not come to the call yet is waited for, and so is one that has not called the closure at all."""
    passed: Passed = {0: {"f": [2, 2]}, 1: {"f": [1]}, 2: {"g": [9]}, 3: {"f": [3]}}
    assert ahead(Place("f", 2), passed) == [3]
    assert ahead(Place("f", 4), passed) == []


def test_ranks_in_one_call_are_not_apart():
    """Whatever else they have called; and with one rank in a later call they are."""
    passed = {rank: {"f": [5, 5], "g": [rank]} for rank in range(3)}
    assert not is_apart(dict.fromkeys(range(3), Place("f", 5)), passed)
    passed[2]["f"] = [6, 6]
    assert is_apart({0: Place("f", 5), 1: Place("f", 5), 2: Place("f", 6)}, passed)


def test_a_call_that_begins_is_at_no_time_taken_for_one_that_is_over():
    """A thread that answers peers may read the numbers between any two lines."""
    seen = []

    class Watched(Calls):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "n_calls" and hasattr(self, "under_way"):
                seen.append(ahead(Place("f", self.n_calls), {1: {"f": standing(self)}}))

    with Watched().one():
        pass
    assert seen == [[]]


def test_a_call_that_has_a_higher_number_on_other_ranks_is_counted_as_that_one():
    """It is under way by both numbers, and the next call comes after the higher one."""
    calls = Calls(n_calls=2)
    with calls.one() as number:
        calls.count_as(number, 7)
        calls.count_as(number, 7)
        assert [ahead(Place("f", each), {1: {"f": standing(calls)}}) for each in (number, 7, 8)] == [[], [], []]
    assert standing(calls) == [7]
    with calls.one() as number:
        assert number == 8
        calls.count_as(number, 5)
    assert standing(calls) == [8]


def test_calls_are_counted_by_ranks_and_closure():
    """One object for each, for the life of the process: a closure may be decorated anew."""
    ours, theirs = calls_of((0, 7), "test.f"), calls_of((0, 8), "test.f")
    assert calls_of((0, 7), "test.f") is ours
    with ours.one():
        assert all_passed((0, 7)) == {"test.f": [1, 1]}
        assert all_passed((0, 8)) == {"test.f": [0]}
    theirs.n_calls += 1
    assert all_passed((0, 8)) == {"test.f": [1]}


@given(st.lists(st.integers(0, 6), min_size=2, max_size=8))
def test_of_ranks_in_different_calls_some_are_behind_and_never_all(n_before: list[int]):
    """Each waits in the call after as many that are over: those with the highest number go on together, all others are behind them."""
    passed, numbers = {}, {}
    for rank, n_over in enumerate(n_before):
        calls = Calls()
        for _ in range(n_over):
            with calls.one():
                pass
        waiting = calls.one()
        numbers[rank] = waiting.__enter__()
        passed[rank] = {"f": standing(calls)}
    places = {rank: Place("f", number) for rank, number in numbers.items()}
    behind = {rank for rank, number in numbers.items() if ahead(Place("f", number), passed)}
    assert behind == {rank for rank, number in numbers.items() if number < max(numbers.values())}
    assert is_apart(places, passed) == bool(behind) == (len(set(numbers.values())) > 1)
    assert len(behind) < len(numbers)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=2, max_size=6))
def test_a_rank_is_left_behind_by_those_alone_that_will_not_come(others: list[tuple[int, bool]]):
    """A rank in its third call: another one has passed it after three calls or more, unless it is in the third itself."""
    passed = {rank: {"f": [n_calls, n_calls] if waits else [n_calls]} for rank, (n_calls, waits) in enumerate(others)}
    gone = [rank for rank, (n_calls, waits) in enumerate(others) if n_calls > 3 or (n_calls == 3 and not waits)]
    assert ahead(Place("f", 3), passed) == gone


def test_collectives_say_which_calls_belong_together():
    """Ranks of different numbers are in one call after the same collectives, if some of these are of the call."""
    assert is_one_call([Place("f", 8, 5, before=4), Place("f", 6, 5, before=4)])
    assert not is_one_call([Place("f", 8, 5, before=4), Place("f", 6, 4, before=3)])
    assert not is_one_call([Place("f", 8, 5, before=5), Place("f", 6, 5, before=5)])
    assert not is_one_call([Place("f", 8, 5, before=4), Place("g", 8, 5, before=4)])


@pytest.mark.parametrize(
    ("place", "has_come"),
    [
        (Place("f", 6), True),
        (Place("g", 6, 4, before=2), False),
        (Place("f", 7, 2, before=2), True),
        (Place("f", 7, 3, before=1), True),
        (Place("f", 7, 4, before=3), True),
        (Place("f", 7, 5, before=3), True),
        (Place("f", 7, 1, before=0), False),
        (Place("f", 7, 2, before=0), False),
        (Place("f", 7, 4, before=4), False),
    ],
    ids=[
        "its number",
        "another closure",
        "before the first",
        "since an earlier run",
        "after the last",
        "gone on",
        "not yet",
        "before it",
        "after it",
    ],
)
def test_a_rank_is_in_a_call_whose_collectives_it_shares(place: Place, has_come: bool):
    """Of call 6, which holds collectives 3 and 4: what has issued one of them, or would issue one as its first, is inside."""
    assert is_inside(place, Place("f", 6, 4, before=2)) == has_come


def test_a_call_without_collectives_is_told_by_its_number():
    """Also where the group has issued some before."""
    assert is_inside(Place("f", 6, 9, before=7), Place("f", 6, 4, before=4))
    assert not is_inside(Place("f", 7, 4, before=4), Place("f", 6, 4, before=4))


def test_a_rank_that_has_issued_more_collectives_has_gone_on():
    """The number of its call says nothing; and a rank with a higher one that is inside a first run may be in this very call."""
    place = Place("f", 6, 5, before=4)
    passed: Passed = {0: {"f": [4], ISSUED: [6]}, 1: {"f": [8, 8], ISSUED: [5]}, 2: {"f": [2], ISSUED: [5]}}
    assert ahead(place, passed, inside=[1]) == [0]
    assert ahead(place, passed) == [0, 1]


def test_calls_within_a_call_that_others_count_higher_are_counted_on():
    """Outer call 1 with call 2 inside it, and elsewhere outer call 4 with call 5: the next one is the sixth on both."""
    calls = Calls()
    with calls.one() as outer:
        with calls.one():
            pass
        calls.count_as(outer, 4)
    with calls.one() as following:
        assert following == 6


def test_a_call_that_raised_and_is_made_again_counts_once():
    """Unless a collective has come between: then this rank has gone on with its peers, and what it calls is their next one."""
    calls = Calls(n_calls=3)
    calls.note_raised("f", ValueError("once"), 7)
    assert (calls.n_calls, calls.raised) == (3, "ValueError in f, call 3: once")
    calls.go_on(7)
    calls.go_on(7)
    assert calls.n_calls == 2
    calls.note_raised("f", ValueError("once"), 7)
    calls.go_on(8)
    assert calls.n_calls == 2


def test_calls_by_group_look_at_the_call_after_one_that_raised():
    """Only that one, and only in its group; also if the ranks of the group are known from then on."""
    n_issued = 7
    calls = CallsByGroup(lambda: n_issued)
    calls["a"].n_calls += 1
    calls["b"].n_calls += 1
    counted = calls["a"]
    calls.note_raised("a", "f", ValueError("once"))
    calls["b"].n_calls += 1
    calls["a"].n_calls += 1
    assert calls["a"] is counted
    assert (calls["a"].n_calls, calls["b"].n_calls) == (1, 2)
    calls.note_raised("a", "f", ValueError("once"))
    calls.count_on("a", counted)
    assert counted.n_calls == 0


def test_errors_of_earlier_calls_are_told_with_their_ranks():
    """Of those ranks alone that have had one."""
    assert (
        raised_in({0: Place("f", 1), 1: Place("f", 2, raised="ValueError in f, call 1: once")})
        == "rank 1 raised ValueError in f, call 1: once"
    )
    assert raised_in({0: Place("f", 1)}) == ""


def test_threads_that_call_after_one_that_raised_count_alike():
    """Two threads come to the look-up that such a call costs: the second may not begin a count of its own, which no peer would hear of."""
    found: list[Calls] = []
    thread = threading.Thread(target=lambda: found.append(calls["group"]))

    def n_issued() -> int:
        if known.n_calls and thread.ident is None and is_looking:
            thread.start()
            thread.join(0.2)
        return 0

    known, is_looking, calls = Calls(5), False, CallsByGroup(n_issued)
    calls.count_on("group", known)
    calls.note_raised("group", "f", ValueError("no batch"))
    is_looking = True
    assert calls["group"] is known
    thread.join()
    assert found[0] is known
