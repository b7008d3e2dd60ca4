"""Races over random tables of times: they end, within their bounds, alike in any order of what
ranks say, and the best wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search import Plan, PriorTimes, Race, Report, SearchName, Times
from dist_tune.search.selection import RacingOptions
from tests.search.playing import Take, World, entered

TIE = RacingOptions().tie

a_few = st.sampled_from([0.25, 1.0, 1.001, 1.1, 1.5, 4.0])  # so that ties happen
fair = st.one_of(*[a_few] * 8, st.just("broke"))
any_time = st.one_of(
    *[st.sampled_from([0.25, 1.0, 1.5, 4.0])] * 6,
    st.sampled_from([math.nan, math.inf, 0.0]),
    st.just("broke"),
)
sizes = st.lists(st.one_of(st.integers(1, 4), st.integers(5, 30)), min_size=1, max_size=3)
racing: Any = st.sampled_from(["racing", "racing", "exhaustive"])
plans = st.builds(
    Plan,
    st.integers(0, 2),
    st.integers(1, 5),
    racing,
    objective=st.sampled_from(["closure", "kernel"]),
)


class Game(NamedTuple):
    plan: Plan
    sites: dict[str, int]
    """Site -> candidates."""
    failures: dict[str, dict[int, str]]
    """Before the race."""
    prior: dict[str, PriorTimes]
    """These times have nothing to do with the ones that are taken."""
    n_ranks: int
    take: Take

    def race(self) -> Race:
        race = Race(self.plan)
        for site, n_candidates in self.sites.items():
            race.add(site, n_candidates, self.failures[site], self.prior[site])
        return race

    def shuffled(self, dice: Any) -> Game:
        """The same, in another order."""
        prior = {
            s: PriorTimes(shuffled(dice, each.times), each.winner) for s, each in self.prior.items()
        }
        return self._replace(
            sites=shuffled(dice, self.sites),
            failures={s: shuffled(dice, f) for s, f in self.failures.items()},
            prior=prior,
        )


def shuffled(dice: Any, entries: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dice.sample(list(entries.items()), len(entries)))


@st.composite
def games(
    draw: st.DrawFn,
    times: Any,
    plans: Any = plans,
    *,
    has_prior: bool = False,
    has_strangers: bool = False,
) -> Game:
    n_ranks, sites = draw(st.integers(1, 3)), {f"s{i}": n for i, n in enumerate(draw(sizes))}
    failures = {
        site: dict.fromkeys(draw(st.sets(st.integers(0, n - 1), max_size=2)), "rank 0: no")
        for site, n in sites.items()
    }
    known = {
        site: draw(st.dictionaries(st.integers(0, n - 1), a_few)) if has_prior else {}
        for site, n in sites.items()
    }
    winners = {
        site: draw(st.none() | st.integers(0, n - 1)) if has_prior else None
        for site, n in sites.items()
    }
    prior = {
        site: PriorTimes({i: Times(ms, ms + 1.0) for i, ms in known[site].items()}, winners[site])
        for site in sites
    }
    strangers = (
        draw(st.sets(st.tuples(st.integers(0, n_ranks - 1), st.sampled_from(sorted(sites)))))
        if has_strangers
        else ()
    )
    pool = draw(st.lists(times, min_size=1, max_size=60))

    def take(rank: int, site: str, i: int, replay: int) -> Any:
        return (
            None
            if (rank, site) in strangers
            else pool[(rank * 7 + int(site[1:]) * 5 + i * 3 + replay) % len(pool)]
        )

    return Game(draw(plans), sites, failures, prior, n_ranks, take)


def expected(
    n: int, failed: set[int], ranks: Mapping[int, Mapping[int, list[float]]]
) -> int | None:
    """The winner, computed anew from all samples: least MAX over owners of medians, then lowest
    index.
    """
    failed |= {
        i
        for each in ranks.values()
        for i, ms in each.items()
        if not (math.isfinite(median(ms)) and median(ms) > 0)
    }
    alive = [i for i in range(n) if i not in failed]
    owners = list(ranks.values())
    reduced = [
        (max(median(each[i]) for each in owners), i)
        for i in alive
        if owners and all(i in each for each in owners)
    ]
    return min(reduced)[1] if reduced else min(alive, default=None)


tables = st.builds(
    Plan, st.integers(0, 2), st.integers(1, 3), st.just("exhaustive"), st.just("kernel")
)


@given(games(any_time, tables, has_strangers=True))
def test_any_table_ends_with_the_least_agreed_time(game: Game):
    """Whatever fails or is not met, the search ends in time, and the winner is the argmin of the
    MAX of medians.
    """
    search = game.race()
    run = World(search, game.n_ranks, game.take).finish(
        at_most=6 * sum(game.sites.values()) * (2 + 3)
    )
    for site, n in game.sites.items():
        failed = set(game.failures[site]) | {
            i for each in run.failures.get(site, {}).values() for i in each
        }
        assert search[site].best == expected(n, failed, run.samples.get(site, {}))


@given(games(fair))
def test_any_race_ends_within_its_bound(game: Game):
    """As foreseen after each batch.

    All that can be timed are, failures are never asked for again, and no winner failed.
    """
    search = game.race()
    bound, world = search.n_left, World(search, game.n_ranks, game.take)
    while world.batch():
        for site in game.sites:
            known = {i for i, each in enumerate(search[site].results()) if each.failure}
            assert not known & {
                replay[site].candidate for replay in search.batch() if site in replay
            }
        assert len(world.replays) <= bound
        bound = min(bound, len(world.replays) + search.n_left)
    for site, n in game.sites.items():
        results, best = search[site].results(), search[site].best
        assert (
            all(each.times or each.failure for each in results) or n - len(game.failures[site]) < 2
        )
        assert (
            results[best].failure is None
            if best is not None
            else all(each.failure for each in results)
        )


@given(games(st.one_of(fair, st.none()), has_prior=True), st.randoms(use_true_random=False))
def test_equal_tallies_give_equal_races(game: Game, dice: Any):
    """Sites and candidates may come in another order on another rank: same replays, same winners,
    same reasons.

    With sites that are met now and then, differently on each rank, which get overtime, and not for
    ever; whatever is known before.
    """
    search, other = game.race(), game.shuffled(dice).race()
    world, at_most = World(search, game.n_ranks, game.take), 60 * sum(game.sites.values()) + 100
    while batch := other.batch():
        assert batch == search.batch()
        assert len(world.replays) <= at_most
        world.batch()
        told = world.reduced()
        failures = {site: shuffled(dice, each) for site, each in told.failures.items()}
        other.tell(
            len(batch),
            Report(
                {site: shuffled(dice, each) for site, each in shuffled(dice, told.times).items()},
                failures,
            ),
        )
    assert search.batch() == []
    for site in game.sites:
        best, results = search[site].best, search[site].results()
        assert (
            results[best].failure is None
            if best is not None
            else all(each.failure for each in results)
        )
        assert (other[site].best, other[site].selection) == (best, search[site].selection)
        assert other[site].results() == results


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.booleans()), min_size=1, max_size=40),
    st.floats(0.5, 2.0),
    plans,
)
def test_known_times_cost_no_quality(table: list[tuple[float, bool]], drift: float, plan: Plan):
    """Whatever is known, and however slow the device is today: the winner is as fast as the
    fastest, but for a tie.
    """
    times, known = (
        [ms for ms, _ in table],
        {i: ms for i, (ms, is_known) in enumerate(table) if is_known},
    )
    winner = min(known, key=lambda i: (known[i], i), default=None)
    search = entered(
        len(times),
        plan,
        prior=PriorTimes({i: Times(ms, ms + 1.0, n_replays=10) for i, ms in known.items()}, winner),
    )
    bound, world = (
        search.n_left,
        World(search, 2, lambda rank, site, i, replay: times[i] * drift).finish(),
    )
    best = search["s"].best
    assert best is not None
    assert times[best] <= min(times) * (1 + 2 * TIE)
    assert not {trial.candidate for trial in world.trials() if trial} & (known.keys() - {winner})
    # Where nobody is new the choice stands.
    assert len(world.replays) <= (bound if len(known) < len(times) else 0)
    results = search["s"].results()
    assert all(
        (each := results[i].times) is not None and each.n_replays == 10
        for i in known.keys() - {winner}
    )


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(0, 8))), min_size=1, max_size=4),
    st.builds(Plan, st.integers(0, 3), st.integers(1, 4), racing),
)
def test_suspects_of_several_sites_never_share_a_replay(
    sites: list[tuple[int, set[int]]], plan: Plan
):
    """The other sites run a candidate that is timed already, if they have one that is no suspect;
    and each suspect has its turn.
    """
    n_candidates = {f"s{k}": n for k, (n, _) in enumerate(sites)}
    suspects = {f"s{k}": sorted(i for i in found if i < n) for k, (n, found) in enumerate(sites)}
    race = Race(plan)
    for site, n in n_candidates.items():
        race.add(site, n, {}, PriorTimes(suspects=suspects[site]))
    world, timed = (
        World(race, 2, lambda rank, site, i, k: 1.0 + i / 8),
        {site: set[int]() for site in n_candidates},
    )
    while n_replays := world.batch():
        batch = [
            (number, site, trial)
            for number, each in enumerate(world.replays[-n_replays:])
            for site, trial in each.items()
        ]
        doubtful = {
            (s, t.candidate)
            for _, s, t in batch
            if t.is_timed and t.candidate in {*suspects[s]} - timed[s]
        }
        assert len(doubtful) <= 1
        if doubtful:
            assert n_replays == 1
            for _, site, trial in batch:
                assert (
                    not trial.is_timed
                    or (site, trial.candidate) in doubtful
                    or n_candidates[site] == len(suspects[site])
                )
        for _, site, trial in batch:
            if trial.is_timed:
                timed[site].add(trial.candidate)
    for site, n in n_candidates.items():
        if n > 1:
            assert set(suspects[site]) <= timed[site]
            assert race[site].best == 0


@given(
    st.lists(st.floats(1.0, 3e3), min_size=1, max_size=25),
    st.floats(0.1, 60.0),
    racing,
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_any_search_overruns_its_budget_by_little(
    times_ms: list[float], budget_s: float, name: SearchName, n_warmup: int, n_repeat: int
):
    """By no more than two of the longest replays and the second that a batch lasts; what wins was
    measured, what was not says why.
    """
    search = entered(len(times_ms), Plan(n_warmup, n_repeat, name, budget_s=budget_s))
    world = World(search, 1, lambda rank, site, i, replay: times_ms[i], began_s=0.0).finish()
    # A batch is planned by the replays before it: each of its own may be as long as the longest of
    # all.
    longest_s = max(times_ms) / 1e3
    assert world.elapsed_s <= budget_s + 2 * longest_s + longest_s * min(1.0, budget_s) / (
        min(times_ms) / 1e3
    )
    best = search["s"].best
    assert best is not None
    if len(times_ms) > 1:
        results = search["s"].results()
        assert results[best].times is not None
        lefts = {each.left for each in results if each.times is None}
        assert lefts <= (
            {f"not raced: the budget of {budget_s:g} s was spent"}
            if world.elapsed_s >= budget_s
            else set()
        )
