"""A budget of seconds, fed with plain numbers: the search ends in time, with what it knows, and says what it left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune import autotune, contextual_autotune
from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search import (
    Plan,
    Race,
    Replay,
    Report,
    SearchName,
    Times,
)
from tests.search.playing import searching

pytestmark = pytest.mark.once


def play(
    search: Race, seconds: Mapping[int, float], began_s: float = 0.0, failing: frozenset[int] = frozenset()
) -> tuple[list[Replay], float]:
    """Replay to the end on a clock that knows what each candidate takes; returns the replays and the seconds."""
    replays: list[Replay] = []
    elapsed_s, n_timed = began_s, dict.fromkeys(seconds, 0)
    while batch := search.batch():
        failures: dict[int, CandidateFailure] = {}
        for replay in batch:
            i = replay["s"].candidate
            elapsed_s += seconds[i]
            if i in failing:
                failures[i] = CandidateFailure(FailureKind.LAUNCH, "rank 0: no")
            elif replay["s"].is_timed:
                n_timed[i] += 1
        replays += batch
        times = {i: Times(1e3 * seconds[i], 1e3 * seconds[i], n_replays=n, n_timed=n) for i, n in n_timed.items() if n}
        batch_s = sum(seconds[replay["s"].candidate] for replay in batch)
        search.tell(len(batch), Report({"s": times}, {"s": failures}, elapsed_s=elapsed_s, batch_s=batch_s))
    return replays, elapsed_s


@pytest.mark.parametrize("name", ["racing", "exhaustive"])
def test_the_search_ends_with_what_it_knows(name: SearchName):
    """Twenty candidates of 1 s and a budget of 5 s: five are measured, the best of them wins, the others are named with the reason."""
    seconds = {i: 1.0 + i / 100 for i in range(20)}
    search = searching(Plan(0, 1, name, budget_s=5.0), {"s": 20})
    replays, elapsed_s = play(search, seconds)
    measured = {replay["s"].candidate for replay in replays}
    assert 4 <= len(replays) <= 6
    assert elapsed_s <= 5.0 + 1.2
    assert search["s"].best == min(measured)
    lefts = {i: each.left for i, each in enumerate(search["s"].results())}
    assert {i for i, left in lefts.items() if left == "not raced: the budget of 5 s was spent"} == set(range(20)) - measured


def test_a_budget_spent_before_the_race_still_tries_what_wins():
    """Compilation took it all: one timed replay of one candidate, which has run on all ranks then; of another one if that fails."""
    for failing, winner in ((frozenset[int](), 0), (frozenset({0}), 1), (frozenset({0, 1, 2}), None)):
        search = searching(Plan(budget_s=1.0), {"s": 3})
        search.tell(0, Report(elapsed_s=10.0))
        replays, _ = play(search, dict.fromkeys(range(3), 0.1), 10.0, failing)
        assert [replay["s"].candidate for replay in replays] == list(range(min(len(failing) + 1, 3)))
        assert search["s"].best == winner


def test_a_budget_spent_in_the_warm_up_ends_it():
    """Ten configs of 2 s, a budget of 5 s: three have run, the best of these wins unraced, and the rest are named."""
    search = searching(Plan(budget_s=5.0), {"s": 10})
    replays, n_run = search.warm_up({"s": 1}), 0
    while not search.is_enough({"s": 1}):
        n_next = search.n_next(replays)
        n_run, replays = n_run + n_next, replays[n_next:]
        times = {i: Times(2e3 - i, 2e3 - i) for i in range(n_run)}
        search.tell_warm_up(n_next, Report({"s": times}, elapsed_s=2.0 * n_run, batch_s=2.0 * n_next))
    search.end_warm_up({"s": 1})
    assert (n_run, search.batch(), search["s"].best) == (3, [], 2)
    assert [each.left for each in search["s"].results()][3:] == ["not raced: the budget of 5 s was spent"] * 7


@given(
    st.lists(st.floats(0.001, 3.0), min_size=1, max_size=25),
    st.floats(0.1, 60.0),
    st.sampled_from(["racing", "exhaustive"]),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_any_search_overruns_by_little(took: list[float], budget_s: float, name: SearchName, n_warmup: int, n_repeat: int):
    """By no more than two of the longest replays and the second that a batch lasts; and what wins was measured."""
    search = searching(Plan(n_warmup, n_repeat, name, budget_s=budget_s), {"s": len(took)})
    _, elapsed_s = play(search, dict(enumerate(took)))
    # A batch is planned by the replays before it: each of its own may be as long as the longest of all.
    assert elapsed_s <= budget_s + 2 * max(took) + max(took) * min(1.0, budget_s) / min(took)
    best = search["s"].best
    assert best is not None
    assert search["s"].results()[best].times is not None or len(took) == 1


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), *[(each, TypeError) for each in (True, False, 2.0, "3", None)]])
@pytest.mark.parametrize("name", ["n_warmup", "n_repeat"])
def test_a_plan_takes_counts_only(name: str, value: Any, error: type[Exception]):
    """A bool is an int to Python, and a mistake here; no warmup is a choice, no repeat is not."""
    with pytest.raises(error, match=rf"{name}.* got {value!r}"):
        Plan(**{name: value})
    assert Plan(n_warmup=0, n_repeat=1) == Plan(0, 1)
    with pytest.raises(ValueError, match="n_repeat >= 1, got 0"):
        Plan(3, 0)


@pytest.mark.parametrize("name", ["search", "objective"])
def test_a_name_that_is_not_known_is_told_with_those_that_are(name: str):
    with pytest.raises(ValueError, match=rf"{name} must be one of \('\w+'(, '\w+')+\), got 'fast'"):
        Plan(**{name: "fast"})  # type: ignore[arg-type]


def test_a_plan_reads_as_the_options_that_a_user_wrote():
    """Messages of ranks that came with different options quote it."""
    assert str(Plan(0, 2, budget_s=3.0)) == "n_warmup=0, n_repeat=2, search='racing', objective='closure', budget_s=3.0"


@pytest.mark.parametrize(
    ("value", "error"), [*[(each, ValueError) for each in (0, -1.0, math.nan, math.inf)], *[(each, TypeError) for each in (True, "5", [5])]]
)
def test_a_budget_is_a_positive_number_of_seconds(value: Any, error: type[Exception]):
    """The message names the option and the value."""
    decorators = Plan, contextual_autotune, partial(autotune, [{"i": 1}], None)
    for each in decorators:
        with pytest.raises(error, match="budget_s"):
            each(budget_s=value)
    assert (Plan(budget_s=5).budget_s, Plan(budget_s=0.5).budget_s, Plan().budget_s) == (5, 0.5, None)
