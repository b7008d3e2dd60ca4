"""Sites that are met only where another site's candidate leads to them: kernels inside a function that takes its config."""

from __future__ import annotations

import pytest

from dist_tune.search.plan import Plan
from tests.search.test_race import World, searching

pytestmark = pytest.mark.once

N_WAYS, N_CONFIGS = 15, 6


@pytest.mark.parametrize("n_ways", [2, N_WAYS])
def test_the_kernel_that_the_winning_way_launches_is_tuned(n_ways: int):
    """Each way of a function has a kernel of its own: all configs of the winning way's kernel are timed, and its best one wins."""
    best = n_ways - 1
    names = {f"kernel {way}": N_CONFIGS for way in range(n_ways)}

    def take(rank: int, site: str, candidate: int, replay: int) -> float | None:
        way = world.replays[-1]["way"].candidate
        if site == "way":
            return 5.0 if way == best else 10.0 + way
        return 1.0 + abs(candidate - 4) / 10 if site == f"kernel {way}" else None

    world = World(searching(Plan(1, 5), {"way": n_ways, **names}), 2, take)
    world.finish(at_most=400)
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
