"""A guided search in the race: what it tries, when it ends, and what it says of the rest. Plain numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.search_costs import load_full_tables, regrets
from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search import NOT_TRIED, Guide, Plan, PriorTimes, Race, Report, Times, guide_of
from tests.search.test_config_space import grid

pytestmark = pytest.mark.once

SPACE = grid(BLOCK_M=[16, 32, 64, 128, 256], BLOCK_N=[16, 32, 64, 128, 256], num_warps=[2, 4, 8], num_stages=[1, 2, 3])


def cost_ms(text: str, best: tuple[int, int, int, int] = (128, 64, 4, 2)) -> float:
    """A smooth valley around one config."""
    values = [int(word.partition("=")[2]) for word in text.split()]
    return 0.1 * (1 + 0.2 * sum(abs(math.log2(a / b)) for a, b in zip(values, best, strict=True)))


def entered(plan: Plan, texts: list[str], failures: Mapping[int, str] | None = None, prior: PriorTimes | None = None) -> Race:
    """A race of one site after its first vote."""
    guide = guide_of(plan.search, texts, prior)
    untried = guide.untried if guide is not None else ()
    race = Race(plan)
    race.add("s", len(texts), {i: why for i, why in (failures or {}).items() if i not in untried}, prior, guide=guide)
    return race


def play(
    race: Race,
    ms: list[float],
    failures: Mapping[int, str] | None = None,
    broken: Collection[int] = (),
    elapsed_s: float = 0.0,
    compile_s: float = 0.0,
) -> list[list[int]]:
    """Run the race to its end; returns the waves. ``broken`` fail at their launch."""
    waves: list[list[int]] = []
    n_timed: dict[int, int] = {}
    while True:
        while wave := race.waves().get("s"):
            waves.append(wave)
            elapsed_s += compile_s * len(wave)
            race["s"].drop({i: why for i, why in (failures or {}).items() if i in wave})
            race.join({"s": wave})
        if not (batch := race.batch()):
            return waves
        failed: dict[int, CandidateFailure] = {}
        for replay in batch:
            trial = replay["s"]
            elapsed_s += ms[trial.candidate] / 1e3
            if trial.candidate in broken:
                failed[trial.candidate] = CandidateFailure(FailureKind.LAUNCH, "rank 0: no")
            elif trial.is_timed:
                n_timed[trial.candidate] = n_timed.get(trial.candidate, 0) + 1
        times = {i: Times(ms[i], ms[i], n_replays=n, n_timed=n) for i, n in n_timed.items()}
        race.tell(len(batch), Report({"s": times}, {"s": failed}, elapsed_s=elapsed_s))


def tried(race: Race) -> set[int]:
    return {i for i, each in enumerate(race["s"].results()) if each.left != NOT_TRIED}


def test_a_large_space_is_tried_in_part_and_its_best_found():
    """225 candidates: 101 of them at most are tried, and the rest is named as such and has no time."""
    ms = [cost_ms(text) for text in SPACE]
    race = entered(Plan(search=None), SPACE)
    waves = play(race, ms)
    assert race["s"].best == ms.index(min(ms))
    assert waves
    assert len(tried(race)) <= 16 + math.ceil(3 * len(SPACE) / 8)
    assert all(each.times is None and each.failure is None for each in race["s"].results() if each.left == NOT_TRIED)


@given(data=st.data(), n=st.integers(30, 120), n_failing=st.integers(0, 120))
def test_any_guided_search_ends_and_tries_nothing_twice(data: Any, n: int, n_failing: int):
    """With candidates that do not compile and others that fail at their launch; the winner runs, and the same again gives the same."""
    texts = SPACE[:n]
    dice = data.draw(st.randoms(use_true_random=False))
    order = dice.sample(range(n), n)
    failures = dict.fromkeys(order[: min(n_failing, n - 1)], "rank 0: no")
    broken = set(order[len(failures) : min(n - 1, len(failures) + 5)])
    ms = [dice.uniform(0.1, 1.0) for _ in range(n)]
    plan = Plan(n_warmup=dice.randint(0, 3), n_repeat=dice.randint(1, 5), search="guided")
    played = []
    for _ in range(2):
        race = entered(plan, texts, failures)
        waves = play(race, ms, failures, broken)
        played.append((waves, race["s"].best))
        among = [i for wave in waves for i in wave]
        first = set(Guide(texts).spread)
        assert len(among) == len(set(among))
        assert not first & set(among)
        assert set(among) <= set(range(n))
        assert first | set(among) == tried(race)
        assert race["s"].best is not None
        assert race["s"].best not in {*failures, *broken}
    assert played[0] == played[1]


def test_where_the_whole_spread_fails_the_search_goes_on_until_something_runs():
    """One candidate of 225 runs."""
    last = len(SPACE) - 2
    failures = {i: "rank 0: too large" for i in range(len(SPACE)) if i != last}
    race = entered(Plan(search="guided"), SPACE, failures)
    assert race["s"].best is None
    assert race["s"].is_barren
    play(race, [0.1] * len(SPACE), failures)
    assert race["s"].best == last


def test_where_nothing_runs_the_search_ends_without_a_winner():
    failures = dict.fromkeys(range(len(SPACE)), "rank 0: too large")
    race = entered(Plan(search="guided"), SPACE, failures)
    play(race, [0.1] * len(SPACE), failures)
    assert race["s"].best is None
    assert not race["s"].is_barren


@pytest.mark.parametrize(("search", "n", "is_guided"), [(None, 64, False), (None, 65, True), ("guided", 25, False), ("guided", 40, True)])
def test_many_candidates_are_searched_so_by_default(search: Any, n: int, is_guided: bool):
    """More than 64; on demand wherever that tries fewer than all. Racing and exhaustive search try all of any number."""
    assert (guide_of(search, SPACE[:n]) is not None) == is_guided
    assert (guide_of(search, SPACE[:n], n_threads=2) is not None) == is_guided
    assert guide_of("racing", SPACE) is None
    assert guide_of("exhaustive", SPACE) is None


def test_where_threads_are_many_all_candidates_race_by_default():
    """225 candidates: waves would wait longer for their slowest compilations than 32 threads for all of them."""
    assert guide_of(None, SPACE, n_threads=32) is None
    assert guide_of(None, SPACE, n_threads=16) is not None
    assert guide_of("guided", SPACE, n_threads=32) is not None


def test_candidates_with_times_of_an_earlier_tuning_need_no_search():
    """Few are new, so all of those race."""
    prior = PriorTimes({i: Times(1.0, 1.0) for i in range(len(SPACE) - 20)}, 3)
    assert guide_of(None, SPACE, prior) is None


def test_the_budget_ends_a_guided_search():
    """Compiling takes 10 ms a candidate and the budget is 0.3 s: one wave is compiled, and the best of what was timed wins."""
    ms = [cost_ms(text) for text in SPACE]
    race = entered(Plan(search="guided", budget_s=0.15), SPACE)
    waves = play(race, ms, compile_s=0.01)
    assert len(waves) == 1
    timed = {i: each.times for i, each in enumerate(race["s"].results()) if each.times is not None}
    assert race["s"].best == min(timed, key=lambda i: (ms[i], i))


def test_a_site_that_no_replay_meets_is_not_searched_further():
    """Its times tell nothing."""
    race = entered(Plan(search="guided"), SPACE)
    n_batches = 0
    while not race.waves() and (batch := race.batch()):
        race.tell(len(batch), Report())
        n_batches += 1
    assert not race.waves()
    assert n_batches < 10


@pytest.mark.parametrize("n_tried", [3, 40, 225])
def test_a_script_says_how_many_are_tried(n_tried: int):
    """Exactly so many, however good they are; few at a time, as the model learns from each wave."""
    ms = [cost_ms(text) for text in SPACE]
    race = Race(Plan(search="guided", n_tried=n_tried))
    guide = guide_of("guided", SPACE, n_tried=n_tried)
    assert guide is not None
    race.add("s", len(SPACE), {}, guide=guide)
    waves = play(race, ms)
    assert len(tried(race)) == n_tried
    assert max(map(len, waves)) <= 8


@pytest.mark.parametrize("start", [0.0, 0.25, 1.0])
def test_a_sweep_tries_all_in_waves_from_its_place_on(start: float):
    """In a circle, so that ranks that start apart find what others have compiled."""
    guide = guide_of("racing", SPACE, start=start)
    assert guide is not None
    race = Race(Plan(start=start))
    race.add("s", len(SPACE), {}, guide=guide)
    order = [*guide.spread, *(i for wave in play(race, [cost_ms(text) for text in SPACE]) for i in wave)]
    first = round(start * len(SPACE))
    assert order == [*range(first, len(SPACE)), *range(first)]
    assert race["s"].best == min(range(len(SPACE)), key=lambda i: cost_ms(SPACE[i]))


def test_guided_search_comes_near_the_best_of_a_recorded_space_with_a_twentieth_of_it():
    """On a part of the recorded tables, within 5 % of the best nearly always; benchmarks/search_costs.py has all of them."""
    ends = [regrets(table, "guided", len(table.us) // 20, seed)[-1] for seed, table in enumerate(load_full_tables()[::2])]
    assert sum(end <= 0.05 for end in ends) >= len(ends) - 1
