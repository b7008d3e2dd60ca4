"""Races over random tables of times, in any order of what ranks say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search.race import Race
from dist_tune.search.site_race import MAX_OVERTIME
from dist_tune.search.times import Report
from tests.search.test_race import Take, World, searching, table

pytestmark = pytest.mark.once

good = st.sampled_from([0.25, 1.0, 1.5, 4.0])  # a handful, so that ties happen
any_time = st.one_of(*[good] * 6, st.sampled_from([math.nan, math.inf, 0.0]), st.just("broke"))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Race, Race, dict[str, int], dict[str, dict[int, str]], int, Take]:
    plan, n_ranks = table(draw(st.integers(0, 2)), draw(st.integers(1, 3))), draw(st.integers(1, 3))
    sites = {f"s{i}": n for i, n in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))}
    failures = {site: dict.fromkeys(draw(st.sets(st.integers(0, n - 1), max_size=2)), "rank 0: no") for site, n in sites.items()}
    strangers = draw(st.sets(st.tuples(st.integers(0, n_ranks - 1), st.sampled_from(sorted(sites)))))
    pool = draw(st.lists(any_time, min_size=1, max_size=60))

    def take(rank: int, site: str, i: int, replay: int) -> float | str | None:
        return None if (rank, site) in strangers else pool[(rank * 7 + int(site[1:]) * 5 + i * 3 + replay) % len(pool)]

    return searching(plan, sites, failures), searching(plan, sites, failures), sites, failures, n_ranks, take


def expected(n: int, failed: set[int], ranks: Mapping[int, Mapping[int, list[float]]]) -> int | None:
    """The winner, computed anew from all samples: least MAX over owners of medians, then lowest index."""
    failed |= {i for each in ranks.values() for i, ms in each.items() if not (math.isfinite(median(ms)) and median(ms) > 0)}
    alive = [i for i in range(n) if i not in failed]
    owners = list(ranks.values())
    reduced = [(max(median(each[i]) for each in owners), i) for i in alive if owners and all(i in each for each in owners)]
    return min(reduced)[1] if reduced else min(alive, default=None)


@given(worlds())
def test_any_table_ends_with_the_least_agreed_time(world: tuple[Any, ...]):
    """Whatever fails or is not met, the search ends in time, and the winner is the argmin of the MAX of medians."""
    search, _, sites, failures, n_ranks, take = world
    run = World(search, n_ranks, take).finish(at_most=MAX_OVERTIME * sum(sites.values()) * (2 + 3))
    for site, n in sites.items():
        failed = set(failures[site]) | {i for each in run.failures.get(site, {}).values() for i in each}
        assert search[site].best == expected(n, failed, run.samples.get(site, {}))


@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_a_tally_does_not_matter(world: tuple[Any, ...], dice: Any):
    """Two searches that hear the same in dicts of different orders ask for the same and choose the same."""
    search, other, sites, _, n_ranks, take = world

    def shuffled(entries: dict[Any, Any]) -> dict[Any, Any]:
        return dict(dice.sample(list(entries.items()), len(entries)))

    run = World(search, n_ranks, take)
    while batch := other.batch():
        assert batch == search.batch()
        run.batch()
        reduced = run.reduced()
        other.tell(len(batch), Report({s: shuffled(t) for s, t in shuffled(reduced.times).items()}, shuffled(reduced.failures)))
    assert search.batch() == []  # where it decides
    for site in sites:
        assert other[site].best == search[site].best
        assert other[site].results() == search[site].results()
