"""Labels: kernels of one name and key told apart by what they differ in, in whatever order they are met."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dist_tune.runtime.kernel import Later
from dist_tune.sites.labels import SOURCE, Labels, differing, telling
from dist_tune.sites.manifest import RankManifest, SiteManifest, reduce_manifests

pytestmark = pytest.mark.once

A, B, C = ({"code": "c", "BLOCK": block, "rank": "0"} for block in ("16", "32", "64"))


def agreed(*ranks: list[dict[str, str]]) -> list[dict[str, str]]:
    """Labels of all ranks after they have met these kernels and agreed: by the value of BLOCK."""
    labels = [Labels() for _ in ranks]
    for mine, kernels in zip(labels, ranks, strict=True):
        for each in kernels:
            mine.of("k[64]", each)
    told = telling([mine.kinds()["k[64]"] for mine in labels])
    for mine in labels:
        mine.settle({"k[64]": told} if told else {})
    return [{each["BLOCK"]: mine.of("k[64]", each) for each in kernels} for mine, kernels in zip(labels, ranks, strict=True)]


def test_a_kernel_alone_goes_by_name_and_key():
    """Whatever it has captured on each rank."""
    assert agreed([A], [{**A, "rank": "1"}]) == [{"16": "k[64]"}, {"16": "k[64]"}]


@pytest.mark.parametrize("order", list(itertools.permutations([A, B, C])))
def test_the_order_in_which_a_rank_meets_kernels_does_not_matter(order: list[Any]):
    """Nor does the rank's number in all of them."""
    expected = {block: f"k[64]{{BLOCK={block}}}" for block in ("16", "32", "64")}
    assert agreed([A, B, C], [{**each, "rank": "1"} for each in order]) == [expected, expected]


def test_other_code_is_another_kernel():
    """Also where each rank has one of them; what is on both ranks is still one."""
    assert agreed([A], [{**A, "code": "d"}]) == [{"16": "k[64]{code=c}"}, {"16": "k[64]{code=d}"}]
    one, other = agreed([A, {**B, "code": "d"}], [{**B, "code": "d"}])
    assert one["32"] == other["32"] == "k[64]{BLOCK=32,code=d}"


def test_a_rank_that_meets_one_of_them_knows_which():
    """The others say by what they differ."""
    assert agreed([A, B], [B]) == [{"16": "k[64]{BLOCK=16}", "32": "k[64]{BLOCK=32}"}, {"32": "k[64]{BLOCK=32}"}]


def test_what_ranks_do_not_share_tells_kernels_apart_where_nothing_else_does():
    """Each is a site on its rank alone then."""
    one, other = agreed([A, B], [A, C])
    assert one.keys() & other.keys() == {"16"}
    assert one["16"] == other["16"]
    assert len({*one.values(), *other.values()}) == 3


def test_a_kernel_met_after_the_ranks_agreed_is_another_site():
    """The one that has the label keeps it."""
    labels = Labels()
    labels.of("k[64]", A)
    assert labels.settle({"k[64]": ()}) == {}
    assert labels.of("k[64]", B) == "k[64]{BLOCK=32}"
    assert labels.kinds() == {}
    assert labels.of("k[64]", dict(A)) == "k[64]"


def test_an_odd_value_leaves_the_label_readable():
    """No brackets, spaces or quotes of its own: the key ends with the last bracket."""
    labels = Labels()
    labels.of("k[64]", {"a.b[0]": "'x y]'"})
    assert labels.of("k[64]", {"a.b[0]": "'z]'"}) == "k[64]{a.b_0_=277a5d27}"


identities = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("012"), min_size=4, max_size=4)
kernels = st.lists(identities, min_size=1, max_size=4, unique_by=lambda each: tuple(sorted(each.items())))


@given(st.lists(kernels, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_no_two_kernels_of_a_rank_share_a_label(ranks: list[list[dict[str, str]]], random: Any):
    """Before the ranks agree and after; and afterwards the order does not matter."""
    after = []
    for shuffled in (False, True):
        labels = [Labels() for _ in ranks]
        for mine, met in zip(labels, ranks, strict=True):
            met = random.sample(met, len(met)) if shuffled else met
            assert len({mine.of("k", each) for each in met}) == len(met)
            assert [mine.of("k", each) for each in met] == [mine.of("k", dict(each)) for each in met]
        told = telling([mine.kinds()["k"] for mine in labels])
        for mine in labels:
            mine.settle({"k": told} if told else {})
        after.append([[mine.of("k", each) for each in met] for mine, met in zip(labels, ranks, strict=True)])
        assert all(len({*each}) == len(each) for each in after[-1])
    assert after[0] == after[1]


def test_names_that_differ_are_found():
    """Also one that only some have."""
    assert differing([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]) == ["b", "c"]


def test_manifests_say_what_tells_kernels_apart():
    """And travel as JSON; nothing where each rank has one kernel of one code."""
    parts, results = TypeAdapter(RankManifest), TypeAdapter(SiteManifest)
    ranks = [RankManifest(kinds={"k": [{"code": "c", "B": each} for each in blocks], "one": [{"code": "d"}]}) for blocks in ("12", "2")]
    assert [parts.validate_json(parts.dump_json(each)) for each in ranks] == ranks
    reduced = reduce_manifests(dict(enumerate(ranks)))
    assert reduced.told_apart == {"k": ["B"]}
    assert results.validate_json(results.dump_json(reduced)) == reduced


def test_identity_of_a_kernel_alone_is_not_read():
    """One process meets one kernel of a name and key, twice: its code is not read for a label, which is most of what a label costs."""

    def read() -> dict[str, str]:
        raise AssertionError("read")

    labels, identity = Labels(), Later(read)
    assert [labels.of("k[64]", identity), labels.of("k[64]", identity)] == ["k[64]", "k[64]"]
    assert labels.kinds(is_alone=True) == {}
    assert labels.kinds({"k[64]": "f"}) == {"k[64]": [{SOURCE: "f"}]}
    with pytest.raises(AssertionError, match="read"):
        labels.kinds()
    with pytest.raises(AssertionError, match="read"):
        labels.kinds({"k[64]": "f"}, {"k[64]"})


@pytest.mark.parametrize(
    ("kinds", "unread", "told"),
    [
        ([[{SOURCE: "f"}], [{SOURCE: "f"}]], [], {}),
        ([[{SOURCE: "f"}], []], [], {}),  # on one rank alone
        ([[{SOURCE: "f"}], [{SOURCE: "g"}]], ["k"], {}),
        ([[{SOURCE: "f"}], [{"code": "c"}]], ["k"], {}),
        ([[{SOURCE: "f"}], [{"code": "c", "B": "1"}, {"code": "c", "B": "2"}]], ["k"], {}),
        ([[{"code": "c"}], [{"code": "c"}]], [], {}),
        ([[{"code": "c"}], [{"code": "d"}]], [], {"k": ["code"]}),
    ],
)
def test_codes_are_compared_where_fingerprints_differ(kinds: list[Any], unread: list[str], told: dict[str, list[str]]):
    """A captured rank is in the fingerprint but does not tell kernels apart; that shows in the codes, which come in another meeting."""
    ranks = {rank: RankManifest(kinds={"k": each} if each else {}) for rank, each in enumerate(kinds)}
    reduced = reduce_manifests(ranks)
    assert (reduced.unread, reduced.told_apart) == (unread, told)
