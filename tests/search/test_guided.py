"""Guided search: which candidates it tries, when it ends, and what it says of the rest. Plain numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.search_costs import load_full_tables, regrets
from dist_tune.configs import describe
from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search import (
    NOT_TRIED,
    Guide,
    Plan,
    PriorTimes,
    Race,
    Report,
    Times,
    guide_of,
)
from dist_tune.search.guided import ConfigSpace

pytestmark = pytest.mark.once

fields = st.dictionaries(st.sampled_from(["BLOCK_M", "BLOCK_N", "FLAT", "num_warps", "mode"]), st.integers(1, 4), min_size=1, max_size=5)


def grid(**values: list[Any]) -> list[str]:
    """All combinations of values by name, described."""
    texts = [""]
    for name, each in values.items():
        texts = [f"{text} {name}={value}".strip() for text in texts for value in each]
    return texts


@st.composite
def states(draw: st.DrawFn) -> tuple[list[str], dict[int, float], set[int], set[int]]:
    """Texts, times, failures, and untried candidates."""
    sizes = draw(fields)
    texts = grid(**{name: [f"v{k}" if name == "mode" else 2**k for k in range(n)] for name, n in sizes.items()})
    kinds = draw(st.lists(st.sampled_from("tfu"), min_size=len(texts), max_size=len(texts)))
    times = {i: draw(st.floats(1e-6, 1e6)) for i, kind in enumerate(kinds) if kind == "t"}
    return texts, times, {i for i, kind in enumerate(kinds) if kind == "f"}, {i for i, kind in enumerate(kinds) if kind == "u"}


@given(state=states(), n=st.integers(0, 40))
def test_a_wave_is_a_function_of_what_is_told_and_holds_untried_candidates_once(
    state: tuple[list[str], dict[int, float], set[int], set[int]], n: int
):
    """For every order of times, failures and untried candidates, and after any other questions to the space."""
    texts, times, failures, untried = state
    space = ConfigSpace(texts)
    wave = space.wave(n, times, failures, untried)
    assert len(wave) == len(set(wave)) == min(n, len(untried))
    assert set(wave) <= untried
    mixed = random.Random(1).sample(sorted(times.items()), len(times))
    assert ConfigSpace(texts).wave(n, dict(mixed), sorted(failures, reverse=True), sorted(untried, reverse=True)) == wave
    assert space.wave(n, times, failures, untried) == wave


@given(state=states(), n=st.integers(1, 40))
def test_a_spread_begins_with_the_first_and_repeats_nothing(state: tuple[list[str], dict[int, float], set[int], set[int]], n: int):
    """A longer spread begins like a shorter one."""
    texts = state[0]
    spread = ConfigSpace(texts).spread(n)
    assert spread[0] == 0
    assert len(spread) == len(set(spread)) == min(n, len(texts))
    assert ConfigSpace(texts).spread(len(texts))[:n] == spread


def test_neighbours_of_the_best_come_first():
    """Half of a wave is one value apart from the best, if the model says nothing else."""
    texts = grid(BLOCK_M=[32, 64, 128, 256], BLOCK_N=[32, 64, 128, 256], num_stages=[1, 2, 3, 4])
    best = texts.index("BLOCK_M=128 BLOCK_N=128 num_stages=3")
    space = ConfigSpace(texts)
    times = {i: 10.0 for i in space.spread(12) if i != best} | {best: 1.0}
    wave = space.wave(4, times, (), set(range(len(texts))) - times.keys())
    n_alike = [sum(a == b for a, b in zip(texts[i].split(), texts[best].split(), strict=True)) for i in wave]
    assert n_alike[:2] == [2, 2]


def test_what_needs_more_than_a_failed_candidate_comes_last():
    """Of shared memory, say; unless a candidate that needs more has run, so that something else was the reason."""
    texts = grid(BLOCK_M=[32, 64, 128, 256], num_stages=[1, 2, 3, 4])
    at = {text: i for i, text in enumerate(texts)}
    failed = at["BLOCK_M=128 num_stages=2"]
    times = {at["BLOCK_M=64 num_stages=2"]: 1.0, at["BLOCK_M=32 num_stages=1"]: 3.0}
    untried = set(range(len(texts))) - {failed, *times}
    beyond = {i for i, text in enumerate(texts) if i != failed and int(text.split("=")[1].split()[0]) >= 128 and int(text[-1]) >= 2}
    space = ConfigSpace(texts)
    assert set(space.wave(len(untried), times, [failed], untried)[-len(beyond) :]) == beyond
    ran = at["BLOCK_M=256 num_stages=4"]
    assert not set(space.wave(4, {**times, ran: 0.5}, [failed], untried - {ran})) <= set(range(len(texts))) - beyond


@pytest.mark.parametrize("values", [[(1, 2), (2, 1), (4, 4)], [[1, 2], [2, 1], [4, 4]], ["row major", "column major", "none"]])
def test_values_that_are_tuples_lists_or_words_with_spaces_are_seen(values: list[Any]):
    """Two configs that differ in nothing else are apart, and a spread has each of them."""
    texts = grid(warps=[1, 2], shape=[describe({"shape": each}).partition("=")[2] for each in values])
    space = ConfigSpace(texts)
    assert space._n_differing(0).tolist() == [0, 1, 1, 1, 2, 2]
    assert len({texts[i].partition("shape=")[2] for i in space.spread(3)}) == 3


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


def test_the_budget_ends_a_guided_search():
    """Compiling takes 10 ms a candidate and the budget is 0.3 s: one wave is compiled, and the best of what was timed wins."""
    ms = [cost_ms(text) for text in SPACE]
    race = entered(Plan(search="guided", budget_s=0.15), SPACE)
    waves = play(race, ms, compile_s=0.01)
    assert len(waves) == 1
    timed = {i: each.times for i, each in enumerate(race["s"].results()) if each.times is not None}
    assert race["s"].best == min(timed, key=lambda i: (ms[i], i))


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
