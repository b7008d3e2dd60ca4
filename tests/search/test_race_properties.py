"""Races over random tables of times: they end, within their bounds, alike in any order of what ranks say, and the best wins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search import (
    Plan,
    PriorTimes,
    Race,
    Report,
)
from tests.search.playing import Take, World, searching, table

pytestmark = pytest.mark.once

few = st.sampled_from([0.25, 1.0, 1.5, 4.0])  # a handful, so that ties happen

any_time = st.one_of(*[few] * 6, st.sampled_from([math.nan, math.inf, 0.0]), st.just("broke"))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Race, dict[str, int], dict[str, dict[int, str]], int, Take]:
    plan, n_ranks = table(draw(st.integers(0, 2)), draw(st.integers(1, 3))), draw(st.integers(1, 3))
    sites = {f"s{i}": n for i, n in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))}
    failures = {site: dict.fromkeys(draw(st.sets(st.integers(0, n - 1), max_size=2)), "rank 0: no") for site, n in sites.items()}
    strangers = draw(st.sets(st.tuples(st.integers(0, n_ranks - 1), st.sampled_from(sorted(sites)))))
    pool = draw(st.lists(any_time, min_size=1, max_size=60))

    def take(rank: int, site: str, i: int, replay: int) -> float | str | None:
        return None if (rank, site) in strangers else pool[(rank * 7 + int(site[1:]) * 5 + i * 3 + replay) % len(pool)]

    return searching(plan, sites, failures), sites, failures, n_ranks, take


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
    search, sites, failures, n_ranks, take = world
    run = World(search, n_ranks, take).finish(at_most=6 * sum(sites.values()) * (2 + 3))
    for site, n in sites.items():
        failed = set(failures[site]) | {i for each in run.failures.get(site, {}).values() for i in each}
        assert search[site].best == expected(n, failed, run.samples.get(site, {}))


good = st.sampled_from([0.25, 1.0, 1.001, 1.1, 1.5, 4.0])  # a handful, so that ties happen

fair = st.one_of(*[good] * 8, st.just("broke"))

sizes = st.lists(st.one_of(st.integers(1, 4), st.integers(5, 30)), min_size=1, max_size=3)

plans = st.builds(Plan, st.integers(0, 2), st.integers(1, 5), objective=st.sampled_from(["closure", "kernel"]))


@st.composite
def races(draw: st.DrawFn, times: Any) -> tuple[Plan, dict[str, int], dict[str, dict[int, str]], int, Take]:
    plan, n_ranks = draw(plans), draw(st.integers(1, 3))
    sites = {f"s{i}": n for i, n in enumerate(draw(sizes))}
    failures = {site: dict.fromkeys(draw(st.sets(st.integers(0, n - 1), max_size=2)), "rank 0: no") for site, n in sites.items()}
    pool = draw(st.lists(times, min_size=1, max_size=40))

    def take(rank: int, site: str, i: int, replay: int) -> float | str | None:
        ms: float | str | None = pool[(rank * 7 + int(site[1:]) * 5 + i * 3 + replay) % len(pool)]
        return ms

    return plan, sites, failures, n_ranks, take


@given(races(fair))
def test_any_race_ends_within_its_bound(race: tuple[Any, ...]):
    """All that can be timed are, failures are never asked for again, and who wins has failed nowhere."""
    plan, sites, failures, n_ranks, take = race
    search = searching(plan, sites, failures)
    bound, world = search.bound, World(search, n_ranks, take)
    n_before = 0
    while world.batch():
        for site in sites:
            known = {i for i, s in enumerate(search[site].results()) if s.failure}
            later = search.batch()
            assert not known & {replay[site].candidate for replay in later if site in replay}
        assert (n_before := len(world.replays)) <= bound
    for site, n in sites.items():
        results = search[site].results()
        assert all(s.times or s.failure for s in results) or n - len(failures[site]) < 2
        best = search[site].best
        assert results[best].failure is None if best is not None else all(s.failure for s in results)
    assert n_before <= bound


@given(races(st.one_of(fair, st.none())))
def test_a_race_with_gaps_ends(race: tuple[Any, ...]):
    """Sites that are met now and then, differently on each rank, get overtime, and not for ever."""
    plan, sites, failures, n_ranks, take = race
    search = searching(plan, sites, failures)
    World(search, n_ranks, take).finish(at_most=6 * 9 * len(sites) * search.bound)
    assert all((search[site].best is None) == all(s.failure for s in search[site].results()) for site in sites)


@given(races(st.one_of(fair, st.none())), st.randoms(use_true_random=False))
def test_equal_tallies_give_equal_races(race: tuple[Any, ...], dice: Any):
    """Sites and candidates may come in another order on another rank: same replays, same winners, same reasons."""
    plan, sites, failures, n_ranks, take = race

    def shuffled(entries: dict[Any, Any]) -> dict[Any, Any]:
        return dict(dice.sample(list(entries.items()), len(entries)))

    search, other = searching(plan, sites, failures), searching(plan, shuffled(sites), {s: shuffled(f) for s, f in failures.items()})
    world = World(search, n_ranks, take)
    while batch := other.batch():
        assert batch == search.batch()
        world.batch()
        told = world.reduced()
        other.tell(
            len(batch),
            Report({s: shuffled(t) for s, t in shuffled(told.times).items()}, {s: shuffled(f) for s, f in told.failures.items()}),
        )
    assert search.batch() == []
    for site in sites:
        assert (other[site].best, other[site].selection) == (search[site].best, search[site].selection)
        assert other[site].results() == search[site].results()


def race_of(suspects: dict[str, list[int]], n_candidates: dict[str, int], plan: Plan) -> World:
    race = Race(plan)
    for site, n in n_candidates.items():
        race.add(site, n, {}, PriorTimes(suspects=suspects.get(site, [])))
    return World(race, 2, lambda rank, site, i, k: 1.0 + i / 8)


def batches(world: World) -> list[list[Any]]:
    """The batches of a whole search."""
    found = []
    while n := world.batch():
        found.append(world.replays[-n:])
    return found


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(0, 8))), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from(["racing", "exhaustive"]),
)
def test_suspects_of_several_sites_never_share_a_replay(sites: list[tuple[int, set[int]]], n_warmup: int, n_repeat: int, search: Any):
    """The other sites run a candidate that is timed already, if they have one that is no suspect; and each suspect has its turn."""
    n_candidates = {f"s{k}": n for k, (n, _) in enumerate(sites)}
    suspects = {f"s{k}": sorted(i for i in found if i < n) for k, (n, found) in enumerate(sites)}
    world = race_of(suspects, n_candidates, Plan(n_warmup, n_repeat, search=search))
    timed = {site: set[int]() for site in n_candidates}
    for batch in batches(world):
        doubtful = {(s, t.candidate) for each in batch for s, t in each.items() if t.is_timed and t.candidate in {*suspects[s]} - timed[s]}
        assert len(doubtful) <= 1
        if doubtful:
            assert len(batch) == 1
            for site, trial in batch[0].items():
                assert not trial.is_timed or (site, trial.candidate) in doubtful or n_candidates[site] == len(suspects[site])
        for replay in batch:
            for site, trial in replay.items():
                if trial.is_timed:
                    timed[site].add(trial.candidate)
    for site, n in n_candidates.items():
        if n > 1:
            assert set(suspects[site]) <= timed[site]
            assert world.search[site].best == 0
