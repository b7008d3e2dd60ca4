"""Races and finals, fed with plain numbers: who runs, how often, and what it costs at most."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search.plan import Plan, Times, Trial
from dist_tune.search.race import Race
from dist_tune.search.selection import RacingOptions
from dist_tune.search.site_race import MAX_OVERTIME
from dist_tune.search.times import Report
from tests.search.test_race import Take, World, by_index, searching

pytestmark = pytest.mark.once

FINALISTS = RacingOptions().max_finalists


def timed(world: World, site: str = "s") -> list[int]:
    """Candidates in the order in which they were timed."""
    return [trial.candidate for trial in world.trials(site) if trial is not None and trial.is_timed]


def near(rank: int, site: str, candidate: int, replay: int) -> float:
    """One per cent between neighbours, the last one the fastest."""
    return 2.0 - candidate / 50


@pytest.mark.parametrize("n_warmup", [0, 3])
def test_all_are_timed_once_before_any_leaves(n_warmup: int):
    """After an untimed warm-up of one candidate; in an order of the site's own, the same for all ranks."""
    first, again, other = (searching(Plan(n_warmup), {site: 40}).batch() for site in ("s", "s", "t"))
    order = [replay["s"].candidate for replay in first[n_warmup:]]
    assert sorted(order) == list(range(40))
    assert first == again
    assert [replay["t"].candidate for replay in other[n_warmup:]] != order
    assert first[:n_warmup] == [{"s": Trial(0, is_timed=False)}] * n_warmup


def test_the_hopeless_run_once():
    """Twice as slow as the best: one timed replay each, and the log can say when they left."""
    world = World(searching(Plan(), {"s": 40}), 2, lambda rank, site, i, k: 1.0 + i / 50 if i < 6 else 2.0 + i).finish()
    runs = Counter(timed(world))
    assert {runs[i] for i in range(6, 40)} == {1}
    assert all(runs[i] > 1 for i in range(FINALISTS))
    assert [s.left for s in world.search["s"].results()][6:] == ["left the race after rung 0"] * 34
    assert world.search["s"].best == 0


def race(world: World) -> list[int]:
    """Replay all rungs; returns their lengths. The next batch is the finals'."""
    lengths = []
    while world.search.batch() and not world.search.is_final:
        lengths.append(world.batch())
    return lengths


def test_a_rung_keeps_fewer_each_time():
    """Of 80 that are all near the best, each rung keeps half of the one before or fewer, until the finalists are left."""
    world = World(searching(Plan(0, 5), {"s": 80}), 2, near)
    rungs = race(world)
    assert rungs[0] == 80
    assert all(FINALISTS <= later <= max(earlier / 2, FINALISTS) for earlier, later in pairwise(rungs))
    assert len(rungs) <= 5
    assert [world.batch(), world.batch()] == [FINALISTS * 5, 0]  # a round of finals that is clear is the last
    assert world.search["s"].best == 79


def test_n_repeat_bounds_the_rungs():
    """With one repeat all are timed once, and that decides: an exhaustive search would ask for no more."""
    world = World(searching(Plan(0, 1), {"s": 80}), 1, near).finish()
    assert (len(world.replays), set(Counter(timed(world)).values()), world.search["s"].best) == (80, {1}, 79)


def test_finals_give_every_finalist_its_share():
    """Replays of a round differ by one between finalists, and neighbours in one order are not always neighbours."""
    world = World(searching(Plan(0, 6), {"s": 4}), 2, lambda rank, site, i, k: 1.0 + i / 1000 + k % 3 / 100)
    n_before = sum(race(world))
    world.batch()
    runs = [replay["s"].candidate for replay in world.replays[n_before:]]
    shares = Counter(runs).values()
    assert (len(shares), max(shares) - min(shares) <= 1) == (4, True)
    assert len({tuple(runs[k : k + 4]) for k in (0, 4, 8)}) > 1


def test_twenty_sites_take_no_more_replays_than_one_and_its_finals():
    """All race in the same replays, and finals are as long for all as for one; at most three rounds of five replays a finalist."""
    one = World(searching(Plan(), {"s0": 8}), 2, near).finish()
    twenty = World(searching(Plan(), {f"s{i}": 8 for i in range(20)}), 2, near).finish()
    assert len(twenty.replays) <= len(one.replays) + RacingOptions().n_final_rounds * FINALISTS * Plan().n_repeat
    assert [twenty.search[f"s{i}"].best for i in range(20)] == [7] * 20


def test_a_shorter_race_waits_with_its_incumbent():
    """Until the longer one has its finalists, too; both finals are in the same replays."""
    world = World(searching(Plan(0, 5), {"short": 5, "long": 80}), 2, near)
    n_race = sum(race(world))
    world.finish()
    assert world.trials("short")[5:80] == [Trial(0, is_timed=False)] * 75  # nothing is decided within a batch
    for site in ("short", "long"):
        finals = [trial.candidate for trial in world.trials(site)[n_race:] if trial is not None and trial.is_timed]
        assert (len(finals), len(set(finals))) == (len(world.replays) - n_race, FINALISTS)


def test_the_order_of_sites_does_not_matter():
    """Ranks may have met them in different orders."""
    sites = {"a": 8, "b": 30, "c": 1, "d": 17}
    runs = [World(searching(Plan(), dict(order)), 2, near).finish() for order in (list(sites.items()), list(sites.items())[::-1])]
    assert runs[0].replays == runs[1].replays
    assert [runs[0].search[site].best for site in sites] == [runs[1].search[site].best for site in sites]


def test_a_failure_in_the_finals_leaves_a_winner():
    """The leader breaks when it has been timed twice: the next one wins, and the broken one is not run again."""
    seen: Counter[int] = Counter()

    def take(rank: int, site: str, i: int, replay: int) -> float | str:
        seen[i] += 1
        return "broke" if i == 2 and seen[i] > 2 else 1.0 + (i - 2) ** 2 / 10 + i / 100

    world = World(searching(Plan(0, 5), {"s": 5}), 1, take).finish()
    assert world.search["s"].best == 1
    assert world.search["s"].results()[2].failure == "rank 0: broke"


def test_a_site_that_nobody_meets_ends():
    """It is asked for once, and its first candidate that runs is taken."""
    world = World(searching(Plan(0, 2), {"s": 9}, {"s": {0: "rank 0: x"}}), 2, lambda *_: None).finish(at_most=40)
    assert world.search["s"].best == 1


def test_what_is_met_in_part_is_asked_for_again():
    """A site met in every other replay on one rank: all are timed there before any leaves."""
    take: Take = lambda rank, site, i, k: None if rank and k % 2 else 1.0 + i  # noqa: E731
    world = World(searching(Plan(0, 3), {"s": 9}), 2, take).finish(at_most=MAX_OVERTIME * 9 * 3)
    assert set(world.samples["s"][1]) == set(range(9))
    assert world.search["s"].best == 0


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
    World(search, n_ranks, take).finish(at_most=MAX_OVERTIME * len(sites) * search.bound)
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


def test_a_new_site_in_the_finals_is_raced_beside_them():
    """It gets all of its replays; sites that are decided run their winner untimed."""
    search = Race(Plan(0, 2))
    search.add("early", 4, {})
    world = World(search, 1, by_index).finish()
    n_before = len(world.replays)
    search.add("late", 6, {})
    world.finish()
    assert set(timed(world, "late")) == set(range(6))
    assert (search["early"].best, search["late"].best) == (0, 0)
    assert set(world.trials("early")[n_before:]) == {Trial(0, is_timed=False)}


def test_a_site_without_a_choice_is_no_company():
    """Beside a site of one candidate the closure is believed after one replay each; beside a site of two it is not."""
    for n_other, winner in ((1, 1), (2, 0)):
        search = searching(Plan(0, 1), {"s": 2, "other": n_other})
        times = {0: Times(1.0, 3.0), 1: Times(1.1, 2.0)}
        search.tell(len(search.batch()), Report({"s": times, "other": {i: Times(1.0, 3.0) for i in range(n_other)}}))
        assert search.batch() == []
        assert search["s"].best == winner
