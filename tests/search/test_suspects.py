"""Candidates that were under way when a process died: they run after all others, and alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search.plan import Plan, PriorTimes
from dist_tune.search.race import Race
from tests.search.test_race import World

pytestmark = pytest.mark.once


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


@pytest.mark.parametrize("search", ["racing", "exhaustive"])
@pytest.mark.parametrize("n_warmup", [0, 3])
def test_a_suspect_is_timed_after_all_others_and_in_a_batch_of_its_own(search: Any, n_warmup: int):
    """Candidate 0 would be the first, and the one to warm up with."""
    world = race_of({"s": [0, 4]}, {"s": 6}, Plan(n_warmup, 3, search=search))
    ran = [[trial.candidate for replay in batch for trial in replay.values()] for batch in batches(world)]
    first = {i: next(k for k, batch in enumerate(ran) if i in batch) for i in range(6)}
    assert max(first[i] for i in (1, 2, 3, 5)) < min(first[0], first[4])
    assert first[0] != first[4]
    for i in (0, 4):
        assert ran[first[i]] == [i]
    assert world.search["s"].best == 0


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
