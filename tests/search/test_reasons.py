"""The reason of a choice, told by what made it."""

from __future__ import annotations

from typing import Any

import pytest

from dist_tune.search.plan import Plan, PriorTimes, Times
from dist_tune.search.race import Race
from dist_tune.search.selection import select
from tests.search.test_race import World, searching

pytestmark = pytest.mark.once


def of(*pairs: tuple[float, float], rest_spread_ms: float = 0.0, spread_ms: float = 0.0) -> dict[int, Times]:
    """Five repeats of each (kernel, closure)."""
    times: dict[str, Any] = {"spread_ms": spread_ms, "rest_spread_ms": rest_spread_ms, "n_replays": 5, "n_timed": 5}
    return {i: Times(kernel_ms, closure_ms, **times) for i, (kernel_ms, closure_ms) in enumerate(pairs)}


def test_a_single_finalist_is_tied_with_none():
    """The others were hopeless and left: no candidate that left the race is a tie, however its one replay turned out."""
    world = World(searching(Plan(0, 5), {"s": 6}), 1, lambda rank, site, i, replay: 1.0 if i == 3 else 9.0).finish()
    assert (world.search["s"].best, world.search["s"].reason) == (3, "fastest in the race")


def test_where_the_step_has_no_weight_it_is_the_kernel_that_was_fastest():
    """Steps that vary by 10 % do not count, and are not the reason."""
    selection = select(of((1.0, 9.0), (2.0, 8.0), rest_spread_ms=9.0), "closure", 0.0075)
    assert (selection.winner, selection.closure_weight, selection.reason) == (0, 0.0, "fastest kernel")


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        (of((1.0, 3.0), (1.02, 2.5)), "fastest step"),
        (of((1.0, 3.0), (1.3, 3.3), rest_spread_ms=0.3), "fastest kernel"),
        (of((1.001, 3.0), (1.0, 2.999)), "tied within noise"),
        (of((1.0, 3.0), (1.001, 3.0)), "tied within noise, faster kernel"),
        (of((1.0, 3.0), (1.03, 3.03), spread_ms=0.1, rest_spread_ms=0.3), "tied within noise, faster kernel"),
        (of((1.0, 3.0)), "fastest in the race"),
    ],
)
def test_the_reason_follows_from_the_comparison_that_decided(times: dict[int, Times], reason: str):
    """The step where its differences counted, a tie where the winner was taken of several."""
    assert select(times, "closure", 0.0075).reason == reason


def race_of(n_candidates: int, failures: dict[int, str], prior: PriorTimes | None = None, equal: dict[int, int] | None = None) -> Race:
    search = Race(Plan(0, 2))
    search.add("s", n_candidates, failures, prior, equal)
    return search


@pytest.mark.parametrize(
    ("search", "reason"),
    [
        (race_of(1, {}), "the only config"),
        (race_of(3, {0: "no", 2: "no"}), "only one that runs"),
        (race_of(2, {}, equal={1: 0}), "only one that runs"),
        (race_of(2, {}, PriorTimes({0: Times(1.0, 2.0), 1: Times(1.5, 2.0)}, winner=0)), "fastest by earlier times"),
    ],
)
def test_what_had_nothing_to_race_says_why(search: Race, reason: str):
    assert search.batch() == []
    assert search["s"].reason == reason


def test_what_was_never_met_says_so():
    """Its replays have passed, and no launch was seen."""
    world = World(searching(Plan(0, 2), {"s": 3, "t": 3}), 1, lambda rank, site, i, replay: None if site == "s" else 1.0 + i).finish()
    assert world.search["s"].reason in ("was not met in time to be measured", "nothing was measured: no replay met this site")


def test_a_winner_that_fails_afterwards_is_not_the_reason():
    """As where another site's replay makes it fail: what runs now was second."""
    world = World(searching(Plan(0, 2), {"s": 3}), 1, lambda rank, site, i, replay: 1.0 + i).finish()
    world.search["s"].drop({0: "rank 0: late"})
    assert world.search["s"].reason == "fastest of the rest: candidate 0 was chosen, and failed afterwards"
