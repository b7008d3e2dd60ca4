"""Labels: kernels of one name and key told apart by what they differ in, in whatever order they are met."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dist_tune.runtime.kernel import Later
from dist_tune.sites.labels import SOURCE, Labels, matched
from dist_tune.sites.manifest import RankManifest, SiteManifest, reduce_manifests

pytestmark = pytest.mark.once

A, B, C = ({"code": "c", "BLOCK": block, "rank": "0"} for block in ("16", "32", "64"))


def agreed(*ranks: list[dict[str, str]]) -> list[dict[str, str]]:
    """Labels of all ranks after they have met these kernels and agreed: by the value of BLOCK."""
    labels = [Labels() for _ in ranks]
    for mine, kernels in zip(labels, ranks, strict=True):
        for each in kernels:
            mine.of("k[64]", each)
    endings, mixed = matched({rank: mine.kinds({}, {"k[64]"})["k[64]"] for rank, mine in enumerate(labels)})
    assert not mixed
    for rank, mine in enumerate(labels):
        mine.settle({"k[64]": endings[rank]} if endings else {})
    return [{each["BLOCK"]: mine.of("k[64]", each) for each in kernels} for mine, kernels in zip(labels, ranks, strict=True)]


def test_a_kernel_alone_goes_by_name_and_key():
    """Also where it has captured the rank's number."""
    assert agreed([A], [{**A, "rank": "1"}]) == [{"16": "k[64]"}, {"16": "k[64]"}]


@pytest.mark.parametrize("order", list(itertools.permutations([A, B, C])))
def test_the_order_in_which_a_rank_meets_kernels_does_not_matter(order: list[Any]):
    """Nor does the rank's number in all of them."""
    one, other = agreed([A, B, C], [{**each, "rank": "1"} for each in order])
    assert one == other
    assert len({*one.values()}) == 3


def test_other_code_is_another_kernel():
    """Also where each rank has one of them; what is on both ranks is still one, and a rank that meets one of them knows which."""
    one, other = agreed([A], [{**A, "code": "d"}])
    assert one["16"] != other["16"]
    one, other = agreed([A, {**B, "code": "d"}], [{**B, "code": "d"}])
    assert one["32"] == other["32"] != one["16"]


@pytest.mark.parametrize(
    "ranks",
    [
        [[{**A, "rank": "7"}], [{**A, "rank": "9"}]],
        [[A, B], [A, C]],
        [[{**A, "rank": "5"}, {**B, "rank": "6"}], [{**A, "rank": "6"}, {**B, "rank": "5"}]],
    ],
)
def test_what_differs_in_captured_values_alone_is_not_mixed(ranks: list[list[dict[str, str]]]):
    """Where no rank has what both have: told are a value and its ranks."""
    endings, mixed = matched(dict(enumerate(ranks)))
    assert endings == {}
    assert " on rank 0, " in mixed


def test_functions_may_capture_what_is_each_ranks_own():
    """Buffers and groups say nothing where each rank has one function."""
    function = {"code": "c", "buffer": "1f", "key_fn": "-"}
    assert matched({0: [function], 1: [{**function, "buffer": "2f"}]}) == ({}, "")


def test_a_kernel_met_after_the_ranks_agreed_is_another_site():
    """The one that has the label keeps it."""
    labels = Labels()
    labels.of("k[64]", A)
    assert labels.settle({"k[64]": [""]}) == {}
    assert labels.of("k[64]", B) not in ("k[64]", labels.of("k[64]", C))
    assert labels.kinds({}) == {}
    assert labels.of("k[64]", dict(A)) == "k[64]"


identities = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("0123"), min_size=4, max_size=4).map(
    lambda each: {"code": "c", **each}
)
kernels = st.lists(identities, min_size=1, max_size=4, unique_by=lambda each: tuple(sorted(each.items())))


@given(st.lists(kernels, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_no_two_kernels_of_a_rank_share_a_label(ranks: list[list[dict[str, str]]], random: Any):
    """Before the ranks agree and after; and whether kernels are told apart or not does not depend on their order."""
    after = []
    for shuffled in (False, True):
        labels = [Labels() for _ in ranks]
        for mine, met in zip(labels, ranks, strict=True):
            met = random.sample(met, len(met)) if shuffled else met
            assert len({mine.of("k", each) for each in met}) == len(met)
        endings, mixed = matched({rank: mine.kinds({}, {"k"})["k"] for rank, mine in enumerate(labels)})
        for rank, mine in enumerate(labels):
            mine.settle({"k": endings.get(rank, [""])})
        found = [{mine.of("k", each) for each in met} for mine, met in zip(labels, ranks, strict=True)]
        assert [len(each) for each in found] == [len(met) for met in ranks]
        after.append((bool(mixed), [[len({*one} & {*other}) for other in found] for one in found]))
    assert after[0][0] == after[1][0]
    assert after[0][0] or after[0] == after[1]


def test_identity_of_a_kernel_alone_is_not_read():
    """One process meets one kernel of a name and key, twice: its code is not read for a label, which is most of what a label costs."""

    def read() -> dict[str, str]:
        raise AssertionError("read")

    labels, identity = Labels(), Later(read)
    assert [labels.of("k[64]", identity), labels.of("k[64]", identity)] == ["k[64]", "k[64]"]
    assert labels.kinds({}, is_alone=True) == {}
    assert labels.kinds({"k[64]": "f"}) == {"k[64]": [{SOURCE: "f"}]}
    with pytest.raises(AssertionError, match="read"):
        labels.kinds({"k[64]": "f"}, {"k[64]"})


@pytest.mark.parametrize(
    ("kinds", "unread", "is_told"),
    [
        ([[{SOURCE: "f"}], [{SOURCE: "f"}]], [], False),
        ([[{SOURCE: "f"}], []], [], False),  # on one rank alone
        ([[{SOURCE: "f"}], [{SOURCE: "g"}]], ["k"], False),
        ([[{SOURCE: "f"}], [A, B]], ["k"], False),
        ([[A], [A]], [], False),
        ([[A], [{"code": "d"}]], [], True),
    ],
)
def test_identities_are_compared_where_fingerprints_differ(kinds: list[Any], unread: list[str], is_told: bool):
    """They come in another meeting, and travel as JSON."""
    ranks = {rank: RankManifest(kinds={"k": each} if each else {}) for rank, each in enumerate(kinds)}
    parts, results, reduced = TypeAdapter(RankManifest), TypeAdapter(SiteManifest), reduce_manifests(ranks)
    assert [parts.validate_json(parts.dump_json(each)) for each in ranks.values()] == list(ranks.values())
    assert results.validate_json(results.dump_json(reduced)) == reduced
    assert (reduced.unread, bool(reduced.told_apart)) == (unread, is_told)
