"""Races that begin with what earlier tunings found, fed with plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search import (
    Plan,
    PriorTimes,
    Race,
    Times,
    Trial,
)
from dist_tune.search.selection import RacingOptions
from tests.search.playing import Take, World

pytestmark = pytest.mark.once

TIE = RacingOptions().tie


def found(times_ms: Mapping[int, float], winner: int | None = None) -> PriorTimes:
    """The result of a tuning of the same closure: ten replays each."""
    return PriorTimes({i: Times(ms, ms + 1.0, n_replays=10) for i, ms in times_ms.items()}, winner)


def entered(n: int, known: PriorTimes, plan: Plan | None = None, failures: Mapping[int, str] | None = None) -> Race:
    search = Race(plan or Plan())
    search.add("s", n, failures or {}, known)
    return search


def of(times_ms: Sequence[float]) -> Take:
    """Ranks that take these times, whatever the replay."""
    return lambda rank, site, i, replay: times_ms[i]


def race(times_ms: Sequence[float], known: PriorTimes, plan: Plan | None = None, failures: Mapping[int, str] | None = None) -> World:
    """To its end; all ranks take the same times in every replay."""
    return World(entered(len(times_ms), known, plan, failures), 2, of(times_ms)).finish()


def runs(world: World) -> Counter[int]:
    """Candidate -> replays it ran in, timed or not."""
    return Counter(trial.candidate for trial in world.trials("s") if trial is not None)


def test_where_nobody_is_new_the_choice_stands():
    """A list that has only lost some, or changed its order: no replay at all, and all keep their times."""
    world = race([3.0, 2.0, 4.0], found({0: 3.0, 1: 2.0, 2: 4.0}, winner=0))
    assert (world.replays, world.search["s"].best) == ([], 0)
    assert [each.times.n_replays for each in world.search["s"].results() if each.times] == [10] * 3


def test_new_ones_have_the_old_winner_to_beat():
    """Six known ones and a new one that is twice as slow: only the two run, and the others keep their times."""
    times = [2.5, 1.0, 1.01, 1.02, 1.03, 1.04, 1.05]
    world = race(times, found(dict(enumerate(times[1:], 1)), winner=2), Plan(n_warmup=1))
    assert world.replays[:3] == [{"s": Trial(2, is_timed=False)}, {"s": Trial(2, is_timed=True)}, {"s": Trial(0, is_timed=True)}]
    assert (world.search["s"].best, set(runs(world))) == (2, {0, 2})
    results, skipped = world.search["s"].results(), ["not raced: slower in an earlier tuning"] * 5
    assert [each.left for each in results] == ["left the race after rung 1", *skipped[:1], None, *skipped[1:]]
    assert [each.times.n_replays for i, each in enumerate(results) if each.times and i not in runs(world)] == [10] * 5


def test_an_old_winner_that_does_not_run_leaves_a_winner():
    """It fails at the vote: the others race. It fails later: what has run stands, or what was known."""
    times, known = [1.0, 1.1, 1.2], found({0: 1.0, 1: 1.1, 2: 1.2}, winner=0)
    world = race(times, known, failures={0: "rank 1: no"})
    assert (world.search["s"].best, set(runs(world))) == (1, {1, 2})
    search = entered(3, known)
    search["s"].drop({0: "rank 1: wrong"})
    assert (search.batch(), search["s"].best) == ([], 1)
    search = entered(4, known)
    world = World(search, 1, lambda rank, site, i, k: "broke" if i == 0 else times[0] * 2).finish()
    assert (search["s"].best, search["s"].results()[0].failure) == (3, "rank 0: broke")


def test_before_anything_is_measured_the_known_winner_is_the_incumbent():
    """It is what other sites' replays run beside, and not the first candidate."""
    assert entered(3, found({0: 9.0, 2: 1.0}, winner=0))["s"].best == 0
    assert entered(3, found({1: 9.0, 2: 1.0}))["s"].best == 2
    assert entered(3, PriorTimes())["s"].best == 0


sizes_ms = st.floats(0.1, 10.0)

plans = st.builds(
    Plan, st.integers(0, 2), st.integers(1, 5), st.sampled_from(["racing", "racing", "exhaustive"]), st.sampled_from(["closure", "kernel"])
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[float], dict[int, float], float, Plan]:
    """Times, which of them are known, how much slower everything is now, a plan."""
    times = draw(st.lists(sizes_ms, min_size=1, max_size=40))
    known = draw(st.sets(st.integers(0, len(times) - 1)))
    drift = draw(st.floats(0.5, 2.0))
    return times, {i: times[i] for i in known}, drift, draw(plans)


@given(tables())
def test_known_times_cost_no_quality(table: tuple[list[float], dict[int, float], float, Plan]):
    """Whatever is known, and however slow the device is today: the winner is as fast as the fastest, but for a tie."""
    times, known, drift, plan = table
    winner = min(known, key=lambda i: (known[i], i), default=None)
    search = entered(len(times), found(known, winner), plan)
    bound, world = search.bound, World(search, 2, of([ms * drift for ms in times])).finish()
    best = search["s"].best
    assert best is not None
    assert times[best] <= min(times) * (1 + 2 * TIE)
    assert not runs(world).keys() & (known.keys() - {winner})
    assert len(world.replays) <= bound


@st.composite
def doubtful(draw: st.DrawFn) -> tuple[int, PriorTimes, dict[int, str], Plan, Take]:
    """Known times that have nothing to do with the real ones, failures at every point, replays in which the site is not met."""
    n = draw(st.integers(1, 30))
    indices = st.integers(0, n - 1)
    times = {i: Times(draw(sizes_ms), draw(sizes_ms)) for i in draw(st.sets(indices))}
    failures = dict.fromkeys(draw(st.sets(indices, max_size=3)), "rank 0: no")
    pool = draw(st.lists(st.one_of(sizes_ms, sizes_ms, st.just("broke"), st.none()), min_size=1, max_size=30))

    def take(rank: int, site: str, i: int, replay: int) -> Any:
        return pool[(rank * 7 + i * 3 + replay) % len(pool)]

    return n, PriorTimes(times, draw(st.one_of(st.none(), indices))), failures, draw(plans), take


@given(doubtful(), st.randoms(use_true_random=False))
def test_whatever_is_known_a_race_ends(world: tuple[int, PriorTimes, dict[int, str], Plan, Take], dice: Any):
    """Within its overtime, equally whatever the order of what it was told, with a winner that has failed nowhere."""
    n, known, failures, plan, take = world
    other = PriorTimes(dict(dice.sample(list(known.times.items()), len(known.times))), known.winner)
    searches = [entered(n, each, plan, failures) for each in (known, other)]
    ends = [World(search, 2, take).finish(at_most=60 * n + 100) for search in searches]
    assert ends[0].replays == ends[1].replays
    assert searches[0]["s"].results() == searches[1]["s"].results()
    best, results = searches[0]["s"].best, searches[0]["s"].results()
    assert searches[1]["s"].best == best
    assert results[best].failure is None if best is not None else all(each.failure for each in results)
