"""Ballots as they travel, and what follows from those of all ranks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.ballots import BALLOT, Ballot, check_lists, contested, votes
from dist_tune.engine import Measured, Report
from dist_tune.errors import RankMismatchError

text = st.text(max_size=8)
index = st.integers(0, 300)
ms = st.floats(0.0, 1e6)
measured = st.builds(Measured, ms, ms, ms, st.integers(0, 99))
reports = st.builds(
    Report,
    st.dictionaries(text, st.dictionaries(index, measured, max_size=3), max_size=3),
    st.dictionaries(text, st.dictionaries(index, text, max_size=3), max_size=3),
    st.lists(index, max_size=3),
)
sites, hits = st.dictionaries(text, st.lists(text, max_size=3), max_size=3), st.dictionaries(text, text, max_size=3)
ballots = st.builds(Ballot, sites=sites, hits=hits, is_watched=st.booleans(), report=reports)


@given(ballots)
def test_a_ballot_arrives_as_it_was_sent(ballot: Ballot):
    """Indices are ints again, times are bit for bit the same, and entries are in the same order."""
    arrived = BALLOT.validate_json(BALLOT.dump_json(ballot))
    assert arrived == ballot
    assert list(arrived.report.measured) == list(ballot.report.measured)


def differ(*lists: list[str]) -> str:
    with pytest.raises(RankMismatchError) as caught:
        check_lists({}, {rank * 2: Ballot({"gemm[64]": texts}) for rank, texts in enumerate(lists)})
    return str(caught.value)


def test_a_mismatch_names_site_rank_and_first_difference():
    """Both candidates at that index are quoted, each with whose it is."""
    message = differ(["A", "B", "C"], ["A", "B", "C"], ["A", "X", "C"])
    assert "site gemm[64]: rank 4 has 3 candidates" in message
    assert 'first difference at index 1: "X" on rank 4, "B" before' in message


def test_a_list_that_is_the_beginning_of_another_differs_at_its_end():
    """Whichever rank has the shorter one, also none at all."""
    assert 'rank 2 has 1 candidates, ranks before it have 2; first difference at index 1: nothing on rank 2, "B" before' in differ(
        ["A", "B"], ["A"]
    )
    assert 'first difference at index 1: "B" on rank 2, nothing before' in differ(["A"], ["A", "B"])
    assert 'first difference at index 0: nothing on rank 2, "A" before' in differ(["A"], [])


def test_the_order_of_candidates_is_their_identity():
    assert 'index 0: "B" on rank 2, "A" before' in differ(["A", "B"], ["B", "A"])


def test_sites_of_all_ranks_become_known():
    """A site need not be met on all ranks; one that was told in an earlier meeting is compared with that."""
    known: dict[str, list[str]] = {}
    check_lists(known, {0: Ballot({"a": ["A"]}), 1: Ballot({"a": ["A"], "b": ["B"]})})
    check_lists(known, {0: Ballot({"c": []}), 1: Ballot()})
    assert known == {"a": ["A"], "b": ["B"], "c": []}
    with pytest.raises(RankMismatchError, match="site b: rank 0"):
        check_lists(known, {0: Ballot({"b": ["other"]}), 1: Ballot()})


@pytest.mark.parametrize(
    ("hits", "missed", "expected"),
    [
        ([{"s": "A"}, {"s": "A"}], {}, set()),
        ([{"s": "A"}, {}], {}, set()),  # not launched there: nobody is stranded
        ([{"s": "A"}, {"s": "B"}], {}, {"s"}),
        ([{"s": "A"}, {}], {"s": ["A", "B"]}, {"s"}),
        ([{}, {}], {"s": ["A", "B"]}, set()),
        ([{"s": "A", "t": "C"}, {"s": "B", "t": "C"}, {"u": "D"}], {"u": ["D"]}, {"s", "u"}),
    ],
)
def test_a_config_that_another_rank_lacks_is_contested(hits: list[dict[str, str]], missed: dict[str, Any], expected: set[str]):
    """Known on one rank and missed on another, or known differently."""
    assert contested({rank: Ballot(hits=each) for rank, each in enumerate(hits)}, missed) == expected


def test_votes_quote_the_first_rank_against():
    """By candidate, of the asked site alone, in the order of ranks."""
    against: list[dict[str, dict[int, str]]] = [{"s": {1: "no"}}, {}, {"s": {1: "never", 0: "shared memory"}, "t": {5: "x"}}]
    all_ballots = {rank: Ballot(report=Report(failures=each)) for rank, each in enumerate(against)}
    assert votes("s", all_ballots) == {1: "rank 0: no", 0: "rank 2: shared memory"}
    assert votes("unknown", all_ballots) == {}
