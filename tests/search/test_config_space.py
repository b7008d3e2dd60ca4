"""The candidates of a large site as points: spread, and waves of promising ones, in plain numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.configs import describe
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


def test_a_spread_has_every_value_of_every_field():
    texts = grid(BLOCK_M=[32, 64, 128], BLOCK_N=[32, 64, 128], num_warps=[4, 8], mode=["a", "b", "c"])
    taken = [texts[i] for i in ConfigSpace(texts).spread(12)]
    assert {word for text in taken for word in text.split()} == {word for text in texts for word in text.split()}


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


def test_texts_without_fields_are_a_space_as_well():
    """Values that are no numbers, and a config that a number tells from one that reads alike."""
    texts = [f"kind=<Mode {k % 2}> (#{k})" for k in range(30)]
    space = ConfigSpace(texts)
    assert sorted(space.spread(30)) == list(range(30))
    assert len(set(space.wave(8, {0: 1.0, 1: 2.0}, [], range(2, 30)))) == 8


@pytest.mark.parametrize("values", [[(1, 2), (2, 1), (4, 4)], [[1, 2], [2, 1], [4, 4]], ["row major", "column major", "none"]])
def test_values_that_are_tuples_lists_or_words_with_spaces_are_seen(values: list[Any]):
    """Two configs that differ in nothing else are apart, and a spread has each of them."""
    texts = grid(warps=[1, 2], shape=[describe({"shape": each}).partition("=")[2] for each in values])
    space = ConfigSpace(texts)
    assert space._n_differing(0).tolist() == [0, 1, 1, 1, 2, 2]
    assert len({texts[i].partition("shape=")[2] for i in space.spread(3)}) == 3
