"""Sites that are met only where another site's candidate leads to them: kernels inside a function that takes its config."""

from __future__ import annotations

import pytest

from dist_tune.search.guided import Guide
from dist_tune.search.plan import Plan
from tests.search.test_race import Take, World, searching

pytestmark = pytest.mark.once

N_WAYS, N_CONFIGS = 15, 6


@pytest.mark.parametrize("plan", [Plan(1, 5), Plan(1, 5, "exhaustive")], ids=["race", "exhaustive"])
@pytest.mark.parametrize("n_ways", [2, N_WAYS])
def test_the_kernel_that_the_winning_way_launches_is_tuned(n_ways: int, plan: Plan):
    """Each way of a function has a kernel of its own: all configs of the winning way's kernel are timed, and its best one wins.

    Replays of finals time no launches, so that a site without a time gets none there.
    """
    best = n_ways - 1
    names = {f"kernel {way}": N_CONFIGS for way in range(n_ways)}

    def take(rank: int, site: str, candidate: int, replay: int) -> float | None:
        way = world.replays[-1]["way"].candidate
        if site == "way":
            return 5.0 if way == best else 10.0 + way
        if world.search.is_final and candidate not in world.samples.get(site, {}).get(rank, {}):
            return None
        return 1.0 + abs(candidate - 4) / 10 if site == f"kernel {way}" else None

    world = World(searching(plan, {"way": n_ways, **names}), 2, take)
    world.finish(at_most=500)
    assert world.search.best("way") == best
    results = world.search.results(f"kernel {best}")
    assert [each.times is not None for each in results] == [True] * N_CONFIGS
    assert world.search.best(f"kernel {best}") == 4


def test_a_kernel_that_the_winning_way_does_not_launch_costs_one_replay():
    """It is asked for once more when all others are settled, and not again."""

    def take(rank: int, site: str, candidate: int, replay: int) -> float | None:
        if site == "rest":
            return 1.0 + candidate
        return 1.0 if replay == 0 else None

    sites = {"rest": 8, "kernel": 4}
    world = World(searching(Plan(1, 5), sites), 2, take).finish()
    plain = World(searching(Plan(1, 5), sites), 2, lambda *call: take(*call) or 2.0).finish()
    assert len(world.replays) <= len(plain.replays) + 3 * 4 * 6 + 1


def test_the_guided_search_of_a_kernel_begins_when_the_winning_way_launches_it():
    """It had ended without a time: now it tries as many candidates as where the site is met from the beginning, and finds the best."""

    def search(first_met: int) -> World:
        def take(rank: int, site: str, candidate: int, replay: int) -> float | None:
            if site == "rest":
                return 1.0 + candidate
            return 1.0 + abs(candidate - 90) / 100 if replay >= first_met else None

        texts = [f"BLOCK={i}" for i in range(120)]
        guide = Guide(texts)
        race = searching(Plan(1, 5), {"rest": 30})
        race.add("kernel", len(texts), {}, guide=guide, untried=set(range(120)) - set(guide.spread))
        world = World(race, 1, take)
        while True:
            while waves := race.waves():
                race.join(waves)
            if not world.batch():
                return world

    n_alone = len(search(10**6).replays)
    late, early = search(n_alone - 1), search(0)
    n_timed = [sum(each.times is not None for each in world.search.results("kernel")) for world in (late, early)]
    assert n_timed[0] == n_timed[1]
    assert late.search.best("kernel") == early.search.best("kernel") == 90


def test_a_candidate_that_failed_before_is_no_probe():
    """Of those that were missed, one that has failed elsewhere meanwhile says nothing about the site: it is not raced again for that."""
    race = searching(Plan(1, 5), {"rest": 8, "kernel": 4})
    take: Take = lambda rank, site, candidate, replay: 1.0 + candidate if site == "rest" else None  # noqa: E731
    plain = World(searching(Plan(1, 5), {"rest": 8, "kernel": 4}), 1, take).finish()
    world = World(race, 1, take)
    while len(world.replays) < len(plain.replays) - 1:
        world.batch()
    race.drop("kernel", {1: "no memory", 2: "no memory"})
    world.finish(at_most=len(plain.replays))
