"""Roll calls as they travel, and what follows from those of all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dist_tune.ballots import Roll, RollCall, roll
from dist_tune.shares import KEY_CHARS, Bench, Keyset
from dist_tune.space import digest

BENCH = Bench("h", 0, 1)
text = st.text(max_size=8)
benches = st.builds(Bench, text, st.integers(0, 9), st.integers(1, 9))
texts = st.dictionaries(text, text, max_size=3)
lists = st.dictionaries(text, st.lists(text, max_size=3), max_size=3)
calls = st.builds(RollCall, benches, texts, lists, texts, texts, st.booleans())


@given(st.lists(calls, min_size=1, max_size=3))
def test_roll_calls_travel_as_json(told: list[RollCall]):
    """And so does what follows from them, with ranks as ints."""
    parts, results = TypeAdapter(RollCall), TypeAdapter(Roll)
    for call in told:
        assert parts.validate_json(parts.dump_json(call)) == call
    result = roll(dict(enumerate(told)))
    assert results.validate_json(results.dump_json(result)) == result


def called(*spelled: list[str]) -> Roll:
    """Ranks 0, 2, 4, ... that all spell out the candidates of one site."""
    return roll({2 * r: RollCall(BENCH, {"gemm[64]": digest(each)}, {"gemm[64]": each}) for r, each in enumerate(spelled)})


def test_a_mismatch_names_site_rank_and_first_difference():
    """Both candidates at that index are quoted, each with whose it is."""
    message = called(["A", "B", "C"], ["A", "B", "C"], ["A", "X", "C"]).mismatch
    assert "site gemm[64]: rank 4 has 3 candidates" in message
    assert 'first difference at index 1: "X" on rank 4, "B" before' in message


def test_a_list_that_is_the_beginning_of_another_differs_at_its_end():
    """Whichever rank has the shorter one, also none at all."""
    part = 'rank 2 has 1 candidates, ranks before it have 2; first difference at index 1: nothing on rank 2, "B" before'
    assert part in called(["A", "B"], ["A"]).mismatch
    assert 'first difference at index 1: "B" on rank 2, nothing before' in called(["A"], ["A", "B"]).mismatch
    assert 'first difference at index 0: nothing on rank 2, "A" before' in called(["A"], []).mismatch


def test_the_order_of_candidates_is_their_identity():
    assert 'index 0: "B" on rank 2, "A" before' in called(["A", "B"], ["B", "A"]).mismatch


def test_equal_lists_are_told_by_one_rank():
    """The others send a digest, and nothing is asked for again."""
    same = {"s": digest(["A", "B"])}
    told = roll({0: RollCall(BENCH, same, {"s": ["A", "B"]}), 1: RollCall(BENCH, same), 2: RollCall(BENCH)})
    assert (told.lists, told.unlisted, told.mismatch) == ({"s": ["A", "B"]}, [], "")


def test_lists_that_differ_or_are_not_told_are_asked_for():
    """A digest that is not that of the list, or a site that the first rank has not met; sorted, so equal on all ranks."""
    first = RollCall(BENCH, {"s": digest(["A"]), "u": digest(["C"])}, {"s": ["A"], "u": ["C"]})
    other = RollCall(BENCH, {"t": digest(["B"]), "s": digest(["X"]), "u": digest(["C"])})
    assert roll({0: first, 1: other}).unlisted == ["s", "t"]


def test_an_empty_list_counts_as_told():
    """A site that the user pruned to nothing on all ranks needs no second call."""
    empty = {"s": digest([])}
    assert roll({0: RollCall(BENCH, empty, {"s": []}), 1: RollCall(BENCH, empty)}).unlisted == []


@pytest.mark.parametrize(
    ("hits", "missed", "expected"),
    [
        ([{"s": "A"}, {"s": "A"}], "", []),
        ([{"s": "A"}, {}], "", []),  # not launched there: nobody is stranded
        ([{"s": "A"}, {"s": "B"}], "", ["s"]),
        ([{"s": "A"}, {}], "s", ["s"]),
        ([{}, {}], "s", []),
        ([{"s": "A", "t": "C"}, {"s": "B", "t": "C"}, {"u": "D"}], "u", ["s", "u"]),
    ],
)
def test_a_config_that_another_rank_lacks_is_disputed(hits: list[dict[str, str]], missed: str, expected: list[str]):
    """Known on one rank and missed on another, or known differently."""
    told = {rank: RollCall(BENCH, dict.fromkeys(missed, "digest") if rank == 1 else {}, hits=each) for rank, each in enumerate(hits)}
    assert roll(told).disputed == expected


def test_one_rank_that_has_not_watched_is_enough():
    assert roll({0: RollCall(BENCH), 1: RollCall(BENCH, is_watched=False)}).is_watched is False
    assert roll({0: RollCall(BENCH), 1: RollCall(BENCH)}).is_watched is True


def test_ranks_with_equal_keys_are_one_keyset():
    """On one host; where they are all of its ranks the keys are left out, so that the message does not grow."""
    keys = {"s": "a" * KEY_CHARS}
    told = roll({rank: RollCall(Bench("hi"[rank // 2], rank % 2, 2), keys=keys if rank else {"s": "b" * KEY_CHARS}) for rank in range(4)})
    assert told.keysets == {
        "s": [
            Keyset("h", "b" * KEY_CHARS, [0], [0], 2),
            Keyset("h", "a" * KEY_CHARS, [1], [1], 2),
            Keyset("i", "", [2, 3], [0, 1], 2),
        ]
    }
