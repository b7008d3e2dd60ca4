"""Who compiles what, for any distribution of keys over ranks and hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.compiler.partition import KEY_CHARS, CompileKeys, Placement, own_share, partition, split_keys
from dist_tune.sites.manifest import RankManifest, reduce_manifests

pytestmark = pytest.mark.once


def key(letter: str) -> str:
    """A compile key; a space is one of nothing to compile."""
    return letter * KEY_CHARS


def compile_keys(benches: list[Placement], letters: list[str]) -> list[CompileKeys]:
    """Of ranks with these keys, one letter per candidate, as a roll call gives them; no letters: a rank without the site."""
    calls = {
        rank: RankManifest(placement, keys={"s": "".join(map(key, row))} if row else {})
        for rank, (placement, row) in enumerate(zip(benches, letters, strict=True))
    }
    return reduce_manifests(calls).compile_keys.get("s", [])


def by_turns(n_candidates: int) -> dict[int, list[int]]:
    """Number of ranks -> candidates dealt one after the other."""
    return {n: [i % n for i in range(n_candidates)] for n in range(1, 8)}


def four(*letters: str) -> list[set[int]]:
    """The shares of ranks of one host."""
    n = len(letters)
    sets = compile_keys([Placement("h", rank, n) for rank in range(n)], list(letters))
    return [own_share(rank, sets, by_turns(max(map(len, letters)))) for rank in range(n)]


def test_equal_keys_are_shared_as_dealt():
    """What a rank has begun with before it could ask is its share, if all have the same keys; which then are not told again."""
    assert [each.keys for each in compile_keys([Placement("h", 0, 2), Placement("h", 1, 2)], ["ab", "ab"])] == [""]
    assert four("abcdefgh", "abcdefgh", "abcdefgh") == [{0, 3, 6}, {1, 4, 7}, {2, 5}]


def test_a_rank_with_other_keys_compiles_its_own():
    """The last one differs in all candidates; the first two share theirs, and take turns with those it would have begun with."""
    assert four("abcd", "abcd", "ABCD") == [{0, 2, 3}, {1}, {0, 1, 2, 3}]


def test_what_nobody_has_begun_goes_round():
    """Two of four ranks have not met the site: the other two take their shares by turns."""
    assert four("abcdefgh", "abcdefgh", "", "") == [{0, 2, 4, 6}, {1, 3, 5, 7}, set(), set()]


def test_a_common_key_is_compiled_once_among_different_keysets():
    """Ranks differ in candidate 1 only: the others go to one of them each."""
    shares = four("axc", "ayc")
    assert (shares[0] | shares[1], shares[0] & shares[1]) == ({0, 1, 2}, {1})


def test_blank_keys_are_nobodys():
    """Where there is nothing to compile on a rank whose keys are not those of the others, and on a rank without the site."""
    assert four("a b", "acb", "") == [{0, 2}, {1}, set()]


def test_hosts_share_nothing():
    """Files of one host are not seen on another: each compiles all."""
    sets = compile_keys([Placement("h", 0, 2), Placement("h", 1, 2), Placement("i", 0, 1)], ["abc"] * 3)
    assert [own_share(rank, sets, by_turns(3)) for rank in range(3)] == [{0, 2}, {1}, {0, 1, 2}]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Placement], list[str]]:
    n_candidates, n_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    # Positions may clash, or be of no use, and ranks of a host may disagree on how many they are.
    placement = st.builds(Placement, st.sampled_from("hi"), st.integers(0, 6), st.integers(1, 6))
    row = st.one_of(st.just(""), st.text("ab ", min_size=n_candidates, max_size=n_candidates))
    return [draw(placement) for _ in range(n_ranks)], [draw(row) for _ in range(n_ranks)]


@given(groups())
def test_each_key_of_a_host_is_compiled_by_one_rank_that_has_it(group: tuple[list[Placement], list[str]]):
    """Whatever ranks take themselves for, each distinct kernel is compiled once per host, and by one that needs it."""
    benches, letters = group
    sets = compile_keys(benches, letters)
    n_candidates = max(map(len, letters))
    shares = [own_share(rank, sets, by_turns(n_candidates)) for rank in range(len(benches))]
    for host in "hi":
        for i in range(n_candidates):
            for letter in "ab":
                having = [r for r, row in enumerate(letters) if row and benches[r].host == host and row[i] == letter]
                compiling = [r for r in having if i in shares[r]]
                assert len(compiling) == (1 if having else 0)


@given(st.lists(st.text("abcdef0123456789", min_size=KEY_CHARS, max_size=KEY_CHARS), max_size=5))
def test_keys_come_apart_as_they_were_put_together(keys: list[str]):
    assert split_keys("".join(keys)) == keys


def test_efforts_are_dealt_out_alike():
    """Two long candidates do not go to one rank, and each rank has about as much to do."""
    compile_costs = [8.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    positions = partition(compile_costs, [str(i) for i in range(8)], 2)
    assert positions[0] != positions[2]
    assert [sum(e for e, p in zip(compile_costs, positions, strict=True) if p == position) for position in (0, 1)] == [11.0, 11.0]


def test_candidates_of_a_group_stay_together():
    """Eight groups of four on two ranks; a single group is split, so that nobody is idle."""
    groups = [str(i // 4) for i in range(32)]
    positions = partition([1.0] * 32, groups, 2)
    assert all(len(set(positions[k : k + 4])) == 1 for k in range(0, 32, 4))
    assert sorted(partition([1.0] * 8, ["alike"] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.sampled_from("abc")), max_size=20), st.integers(1, 9))
def test_each_candidate_is_dealt_to_one_of_the_ranks(candidates: list[tuple[float, str]], n_ranks: int):
    positions = partition([compile_cost for compile_cost, _ in candidates], [group for _, group in candidates], n_ranks)
    assert len(positions) == len(candidates)
    assert all(0 <= position < n_ranks for position in positions)
