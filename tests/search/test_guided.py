"""Guided search: which candidates it tries, when it ends, and what it says of the rest.

Plain numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.search_costs import load_full_tables, regrets
from dist_tune.configs import describe
from dist_tune.search import NOT_TRIED, Guide, Plan, Race, guide_of
from dist_tune.search.guided import ConfigSpace
from tests.search.playing import World, entered

fields = st.dictionaries(
    st.sampled_from(["BLOCK_M", "BLOCK_N", "FLAT", "num_warps", "mode"]),
    st.integers(1, 4),
    min_size=1,
    max_size=5,
)


def grid(**values: list[Any]) -> list[str]:
    """All combinations of values by name, described."""
    texts = [""]
    for name, each in values.items():
        texts = [f"{text} {name}={value}".strip() for text in texts for value in each]
    return texts


@given(sizes=fields, n=st.integers(0, 40), data=st.data())
def test_a_wave_is_a_function_of_what_is_told_and_holds_untried_candidates_once(
    sizes: dict[str, int], n: int, data: Any
):
    """For every order of times, failures and untried candidates, and after any other questions to
    the space; and so is a spread.
    """
    texts = grid(
        **{
            name: [f"v{k}" if name == "mode" else 2**k for k in range(n)]
            for name, n in sizes.items()
        }
    )
    kinds = data.draw(st.lists(st.sampled_from("tfu"), min_size=len(texts), max_size=len(texts)))
    times = {i: data.draw(st.floats(1e-6, 1e6)) for i, kind in enumerate(kinds) if kind == "t"}
    failures, untried = ({i for i, kind in enumerate(kinds) if kind == wanted} for wanted in "fu")
    space = ConfigSpace(texts)
    wave = space.wave(n, times, failures, untried)
    assert len(wave) == len(set(wave)) == min(n, len(untried))
    assert set(wave) <= untried
    mixed = random.Random(1).sample(sorted(times.items()), len(times))
    assert (
        ConfigSpace(texts).wave(
            n, dict(mixed), sorted(failures, reverse=True), sorted(untried, reverse=True)
        )
        == wave
    )
    assert space.wave(n, times, failures, untried) == wave
    spread = ConfigSpace(texts).spread(n + 1)
    assert spread[0] == 0
    assert len(spread) == len(set(spread)) == min(n + 1, len(texts))
    assert space.spread(len(texts))[: n + 1] == spread


def test_neighbours_of_the_best_come_first():
    """Half of a wave is one value apart from the best, if the model says nothing else."""
    texts = grid(BLOCK_M=[32, 64, 128, 256], BLOCK_N=[32, 64, 128, 256], num_stages=[1, 2, 3, 4])
    best = texts.index("BLOCK_M=128 BLOCK_N=128 num_stages=3")
    space = ConfigSpace(texts)
    times = {i: 10.0 for i in space.spread(12) if i != best} | {best: 1.0}
    wave = space.wave(4, times, (), set(range(len(texts))) - times.keys())
    n_alike = [
        sum(a == b for a, b in zip(texts[i].split(), texts[best].split(), strict=True))
        for i in wave
    ]
    assert n_alike[:2] == [2, 2]


def test_what_needs_more_than_a_failed_candidate_comes_last():
    """Of shared memory, say; unless a candidate that needs more has run, so that something else was
    the reason.
    """
    texts = grid(BLOCK_M=[32, 64, 128, 256], num_stages=[1, 2, 3, 4])
    at = {text: i for i, text in enumerate(texts)}
    failed = at["BLOCK_M=128 num_stages=2"]
    times = {at["BLOCK_M=64 num_stages=2"]: 1.0, at["BLOCK_M=32 num_stages=1"]: 3.0}
    untried = set(range(len(texts))) - {failed, *times}
    beyond = {
        i
        for i, text in enumerate(texts)
        if i != failed and int(text.split("=")[1].split()[0]) >= 128 and int(text[-1]) >= 2
    }
    space = ConfigSpace(texts)
    assert set(space.wave(len(untried), times, [failed], untried)[-len(beyond) :]) == beyond
    ran = at["BLOCK_M=256 num_stages=4"]
    assert (
        not set(space.wave(4, {**times, ran: 0.5}, [failed], untried - {ran}))
        <= set(range(len(texts))) - beyond
    )


@pytest.mark.parametrize(
    "values",
    [[(1, 2), (2, 1), (4, 4)], [[1, 2], [2, 1], [4, 4]], ["row major", "column major", "none"]],
)
def test_values_that_are_tuples_lists_or_words_with_spaces_are_seen(values: list[Any]):
    """Two configs that differ in nothing else are apart, and a spread has each of them."""
    texts = grid(
        warps=[1, 2], shape=[describe({"shape": each}).partition("=")[2] for each in values]
    )
    space = ConfigSpace(texts)
    assert space.n_differing(0).tolist() == [0, 1, 1, 1, 2, 2]
    assert len({texts[i].partition("shape=")[2] for i in space.spread(3)}) == 3


SPACE = grid(
    BLOCK_M=[16, 32, 64, 128, 256],
    BLOCK_N=[16, 32, 64, 128, 256],
    num_warps=[2, 4, 8],
    num_stages=[1, 2, 3],
)


def cost_ms(text: str, best: tuple[int, int, int, int] = (128, 64, 4, 2)) -> float:
    """A smooth valley around one config."""
    values = [int(word.partition("=")[2]) for word in text.split()]
    return 0.1 * (1 + 0.2 * sum(abs(math.log2(a / b)) for a, b in zip(values, best, strict=True)))


COSTS_MS = [cost_ms(text) for text in SPACE]


def raced(
    ms: Sequence[float | str],
    plan: Plan,
    broken: Mapping[int, str] = {},
    guide: Guide | None = None,
    **clock: float,
) -> World:
    """To the end of a race of a part of the space; ``broken`` do not compile."""
    race = entered(
        len(ms), plan, failures=broken, guide=guide or guide_of(plan.search, SPACE[: len(ms)])
    )
    return World(race, 1, lambda rank, site, i, replay: ms[i], broken=broken, **clock).finish()


def tried(race: Race) -> set[int]:
    return {i for i, each in enumerate(race["s"].results()) if each.left != NOT_TRIED}


@given(
    n=st.integers(30, 120),
    n_failing=st.integers(0, 120),
    n_warmup=st.integers(0, 3),
    n_repeat=st.integers(1, 5),
    seed=st.integers(),
)
def test_any_guided_search_ends_and_tries_nothing_twice(
    n: int, n_failing: int, n_warmup: int, n_repeat: int, seed: int
):
    """With candidates that do not compile and others that fail at their launch; the winner runs,
    and the same again gives the same.
    """
    dice = random.Random(seed)
    order = dice.sample(range(n), n)
    broken = dict.fromkeys(order[: min(n_failing, n - 1)], "rank 0: no")
    failing = set(order[len(broken) : min(n - 1, len(broken) + 5)])
    ms = ["no" if i in failing else dice.uniform(0.1, 1.0) for i in range(n)]
    one, again = (raced(ms, Plan(n_warmup, n_repeat, "guided"), broken) for _ in range(2))
    best, among, first = (
        one.search["s"].best,
        [i for wave in one.waves for i in wave],
        set(Guide(SPACE[:n]).spread),
    )
    assert len(among) == len(set(among))
    assert not first & set(among)
    assert first | set(among) == tried(one.search) <= set(range(n))
    assert best is not None
    assert best not in {*broken, *failing}
    assert (again.waves, again.search["s"].best) == (one.waves, best)


def test_where_the_whole_spread_fails_the_search_goes_on_until_something_runs():
    """One candidate of 225 runs."""
    last = len(SPACE) - 2
    assert (
        raced(
            [0.1] * len(SPACE),
            Plan(search="guided"),
            {i: "no" for i in range(len(SPACE)) if i != last},
        )
        .search["s"]
        .best
        == last
    )


def test_many_candidates_are_searched_so_by_default():
    """More than 64, where threads are not so many that waves would wait longer for their slowest
    compilations than all of them together.

    On demand wherever that tries fewer than all. Racing and exhaustive search try all of any
    number.
    """
    numbers: list[tuple[Any, int, int]] = [
        (None, 64, 0),
        (None, 64, 2),
        (None, 225, 32),
        ("guided", 25, 0),
        ("guided", 25, 2),
    ]
    numbers += [("racing", 225, 0), ("exhaustive", 225, 0)]
    assert [
        each
        for each in numbers
        if guide_of(each[0], SPACE[: each[1]], n_threads=each[2]) is not None
    ] == []
    guided: list[tuple[Any, int, int]] = [
        (None, 65, 0),
        (None, 65, 2),
        (None, 225, 16),
        ("guided", 40, 2),
        ("guided", 225, 32),
    ]
    assert [
        each for each in guided if guide_of(each[0], SPACE[: each[1]], n_threads=each[2]) is None
    ] == []


def test_the_budget_ends_a_guided_search():
    """Compiling takes 10 ms a candidate and the budget is 0.15 s: one wave is compiled, and the
    best of what was timed wins.
    """
    world = raced(COSTS_MS, Plan(search="guided", budget_s=0.15), began_s=0.0, compile_s=0.01)
    assert len(world.waves) == 1
    timed = {
        i: each.times
        for i, each in enumerate(world.search["s"].results())
        if each.times is not None
    }
    assert world.search["s"].best == min(timed, key=lambda i: (COSTS_MS[i], i))


@pytest.mark.parametrize("n_tried", [3, 40, 225])
def test_a_script_says_how_many_are_tried(n_tried: int):
    """Exactly so many, however good they are; few at a time, as the model learns from each wave."""
    world = raced(
        COSTS_MS,
        Plan(search="guided", n_tried=n_tried),
        guide=guide_of("guided", SPACE, n_tried=n_tried),
    )
    assert len(tried(world.search)) == n_tried
    assert max(map(len, world.waves)) <= 8


def test_a_sweep_tries_all_in_waves() -> None:
    """In their order, and the best of all wins."""
    guide = guide_of("racing", SPACE, in_waves=True)
    assert guide is not None
    world = raced(COSTS_MS, Plan(), guide=guide)
    assert [*guide.spread, *(i for wave in world.waves for i in wave)] == [*range(len(SPACE))]
    assert world.search["s"].best == min(range(len(SPACE)), key=COSTS_MS.__getitem__)


@pytest.mark.slow  # benchmarks/tests/test_guided_tables.py has smaller tables
def test_guided_search_comes_near_the_best_of_a_recorded_space_with_a_twentieth_of_it():
    """On a part of the recorded tables, within 5 % of the best nearly always;
    benchmarks/search_costs.py has all of them.
    """
    ends = [
        regrets(table, "guided", len(table.us) // 20, seed)[-1]
        for seed, table in enumerate(load_full_tables()[::2])
    ]
    assert sum(end <= 0.05 for end in ends) >= len(ends) - 1
