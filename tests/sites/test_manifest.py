"""Roll calls as they travel, and what follows from those of all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dist_tune.records import digest
from dist_tune.records.lookup import LookupResult
from dist_tune.search.plan import PriorTimes, Times
from dist_tune.sites.manifest import RankManifest, SharedRecord, SiteManifest, reduce_manifests

text = st.text(max_size=8)
texts = st.dictionaries(text, text, max_size=3)
lists = st.dictionaries(text, st.lists(text, max_size=3), max_size=3)
tickets = st.dictionaries(
    text, st.builds(LookupResult, text, text, text, st.booleans()), max_size=3
)
ms = st.floats(0.0, 1e6)
agreed = st.dictionaries(st.integers(0, 9), ms, max_size=2).map(
    lambda ranks_ms: Times(0.1, -0.2, n_replays=3, rank_latencies_ms=ranks_ms)
)
known = st.builds(
    PriorTimes,
    st.dictionaries(st.integers(0, 9), agreed, max_size=2),
    st.none() | st.integers(0, 9),
)
calls = st.builds(
    RankManifest,
    texts,
    lists,
    texts,
    st.booleans(),
    text,
    tickets,
    st.dictionaries(text, known, max_size=2),
    st.dictionaries(text, st.integers(1, 2), max_size=2),
)


@given(st.lists(calls, min_size=1, max_size=3))
def test_roll_calls_travel_as_json(told: list[RankManifest]):
    """And so does what follows from them, with ranks as ints."""
    parts, results = TypeAdapter(RankManifest), TypeAdapter(SiteManifest)
    for call in told:
        assert parts.validate_json(parts.dump_json(call)) == call
    result = reduce_manifests(dict(enumerate(told)))
    assert results.validate_json(results.dump_json(result)) == result


LISTS: list[tuple[list[list[str]], list[str]]] = [
    ([["A", "B", "C"], ["A", "B", "C"], ["A", "X", "C"]], ["A", "C"]),
    ([["A", "B"], ["B"]], ["B"]),
    ([["B"], ["A", "B"]], ["B"]),
    (
        [["A", "B"], ["B", "A"]],
        ["A", "B"],
    ),  # their order is their identity, and the first rank's counts
    ([["A", "B"], ["B", "C"], ["C", "A"]], []),
]


@pytest.mark.parametrize(("spelled", "expected"), LISTS)
def test_of_lists_that_differ_what_all_ranks_have_is_shared(
    spelled: list[list[str]], expected: list[str]
):
    """Where that is nothing, the call is not tuned, for a reason with both lists; ranks without the
    site do not matter.
    """
    found = {
        2 * r: RankManifest({"gemm[64]": digest(each)}, {"gemm[64]": each})
        for r, each in enumerate(spelled)
    }
    result = reduce_manifests({**found, 9: RankManifest()})
    assert result.shared == {"gemm[64]": expected}
    told = (
        'launches gemm[64], and no config of it is on all ranks (2, the first "A" on rank 0, 2, the'
        ' first "C" on rank 4): not tuned; build'
    )
    assert result.why_not.startswith(told) if not expected else result.why_not == ""


def test_equal_lists_are_told_by_one_rank_and_others_asked_for():
    """The others send a digest; asked for is a list that differs, or that the first rank does not
    have; an empty one counts as told.
    """
    same, empty = {"s": digest(["A", "B"])}, {"s": digest([])}
    told = reduce_manifests(
        {0: RankManifest(same, {"s": ["A", "B"]}), 1: RankManifest(same), 2: RankManifest()}
    )
    assert (told.lists, told.unlisted, told.shared) == ({"s": ["A", "B"]}, [], {})
    first = RankManifest({"s": digest(["A"]), "u": digest(["C"])}, {"s": ["A"], "u": ["C"]})
    other = RankManifest({"t": digest(["B"]), "s": digest(["X"]), "u": digest(["C"])})
    assert reduce_manifests({0: first, 1: other}).unlisted == ["s", "t"]
    assert (
        reduce_manifests({0: RankManifest(empty, {"s": []}), 1: RankManifest(empty)}).unlisted == []
    )


CODE, OTHER = {"code": "c", "BLOCK": "16"}, {"code": "d", "BLOCK": "16"}
CAPTURED: list[tuple[list[dict[str, str]], str]] = [
    ([CODE, CODE, {}], ""),
    (
        [{**CODE, "rank": "0"}, {**CODE, "rank": "4"}, {**CODE, "rank": "6"}],
        "",
    ),  # the rank's own number
    (
        [{**CODE, "rank": "0"}, {**CODE, "rank": "1"}, {**CODE, "rank": "2"}],
        "",
    ),  # or its place in the group
    ([{**CODE, "rank": "7"}, {**CODE, "rank": "9"}], "rank=7 on rank 0, 9 on rank 4"),
    ([CODE, {}, {**CODE, "BLOCK": "32"}], "BLOCK=16 on rank 0, 32 on rank 6"),
    ([CODE, OTHER], "code=c on rank 0, d on rank 4"),
    ([CODE, {"code": "c"}], "BLOCK=16 on rank 0, - on rank 4"),
]


@pytest.mark.parametrize(("captured", "told"), CAPTURED)
def test_a_kernel_that_is_another_on_some_rank_is_not_tuned(
    captured: list[dict[str, str]], told: str
):
    """And where it has a config on all ranks, theirs are no dispute."""
    for is_hit in (False, True):
        found = {
            rank: RankManifest(
                {} if is_hit else {"s": digest([])},
                hits={"s": str(rank)} if is_hit else {},
                captured={"s": each},
            )
            for rank, each in zip((0, 4, 6), captured, strict=False)
        }
        result = reduce_manifests(
            {rank: each if each.captured["s"] else RankManifest() for rank, each in found.items()}
        )
        assert (told in result.why_not and bool(result.why_not) == bool(told)) or is_hit
        assert (result.disputed == []) == (bool(told) or not is_hit)


@pytest.mark.parametrize(
    ("hits", "missed", "expected"),
    [
        ([{"s": "A"}, {"s": "A"}], "", []),
        ([{"s": "A"}, {}], "", []),  # not launched there: nobody is stranded
        ([{"s": "A"}, {"s": "B"}], "", ["s"]),
        ([{"s": "A"}, {}], "s", ["s"]),
        ([{}, {}], "s", []),
        ([{"s": "A", "t": "C"}, {"s": "B", "t": "C"}, {"u": "D"}], "u", ["s", "u"]),
    ],
)
def test_a_config_that_another_rank_lacks_is_disputed(
    hits: list[dict[str, str]], missed: str, expected: list[str]
):
    """Known on one rank and missed on another, or known differently."""
    told = {
        rank: RankManifest(dict.fromkeys(missed, "digest") if rank == 1 else {}, hits=each)
        for rank, each in enumerate(hits)
    }
    assert reduce_manifests(told).disputed == expected


# -- the cache -------------------------------------------------------------------------------------


def told(*tickets: LookupResult | None, folders: str = "") -> SiteManifest:
    """Ranks 0, 2, 4, ... of which each says this of site "s"; None: it has not met it.

    A folder a letter; a blank: no cache.
    """
    calls = {}
    for n, ticket in enumerate(tickets):
        of_site = {} if ticket is None else {"s": ticket}
        calls[2 * n] = RankManifest(
            dict.fromkeys(of_site, digest([])), folder=folders[n : n + 1].strip(), lookups=of_site
        )
    return reduce_manifests(calls)


HAS_A, HAS_B, LACKS = LookupResult("key", "A"), LookupResult("key", "B"), LookupResult("key")
OTHER_A, OTHER_B, OTHER_LACKS = (
    LookupResult("other", "A"),
    LookupResult("other", "B"),
    LookupResult("other"),
)
SHALL_TUNE, SWITCHED_OFF, BROKEN = (
    LookupResult("key", is_open=False),
    LookupResult("", is_open=False),
    LookupResult("key", "A", is_open=False),
)


@pytest.mark.parametrize(
    ("tickets", "recalled"),
    [
        ([HAS_A, HAS_A], SharedRecord("A", 0, [])),
        ([HAS_A, LACKS, LACKS], SharedRecord("A", 0, [2, 4])),
        ([LACKS, HAS_A, LACKS], SharedRecord("A", 2, [0, 4])),
        ([HAS_A, HAS_B], SharedRecord("A", 0, [2])),  # two jobs have tuned at once
        ([LACKS, HAS_B, HAS_A], SharedRecord("B", 2, [0, 4])),
        ([HAS_A, OTHER_A], SharedRecord("A", 0, [])),  # two GPUs, and each has come to the same
        ([OTHER_A, HAS_A, LACKS], None),
        ([HAS_A, LACKS, OTHER_A], SharedRecord("A", 0, [2])),
        ([None, HAS_A], SharedRecord("A", 2, [0])),  # who has not met the site gets the record, too
    ],
)
def test_a_hit_on_all_ranks(tickets: list[LookupResult | None], recalled: SharedRecord | None):
    """The first record that a rank has, where all have the same key or the same winner."""
    got = told(*tickets)
    assert got.cached == ({"s": recalled} if recalled is not None else {})
    assert got.refused == ([] if recalled is not None else ["s"])


@pytest.mark.parametrize(
    ("tickets", "refused"),
    [
        ([HAS_A, OTHER_B], True),
        ([HAS_A, OTHER_LACKS], True),
        ([HAS_A, SHALL_TUNE], True),
        ([SWITCHED_OFF, HAS_A], True),
        ([HAS_A, BROKEN], True),
        ([BROKEN, BROKEN], True),
        ([LACKS, LACKS], False),
        ([SHALL_TUNE, LACKS, SWITCHED_OFF], False),
        ([SWITCHED_OFF, SWITCHED_OFF], False),
    ],
)
def test_a_hit_on_none(tickets: list[LookupResult | None], refused: bool):
    """A rank of another key without that winner, one that shall tune, one on which it does not run;
    those who have a record drop it.
    """
    got = told(*tickets)
    assert (got.cached, got.refused) == ({}, ["s"] if refused else [])


def test_a_record_that_must_be_there_is_missed_by_the_first_rank_that_lacks_it():
    """Not where another rank has it; of several sites the first by name."""
    miss = LookupResult("key", miss="Why.")
    assert told(miss, HAS_A).missed == ""
    assert told(None, LACKS, miss, miss).missed == "site s, rank 4: Why."
    assert told(HAS_A, LookupResult("other", miss="Why.")).missed == "site s, rank 2: Why."
    sites = {site: digest([]) for site in "ts"}
    assert reduce_manifests(
        {0: RankManifest(sites, lookups=dict.fromkeys(sites, miss))}
    ).missed.startswith("site s")


@pytest.mark.parametrize(
    ("tickets", "folders", "keepers"),
    [
        ([LACKS, LACKS, LACKS], "xxy", [0, 4]),
        ([LACKS, OTHER_LACKS, LACKS], "xxx", [0, 2]),
        ([SHALL_TUNE, LookupResult("other", is_open=False)], "xx", [0, 2]),
        ([SWITCHED_OFF, LACKS], " x", [2]),
        ([None, LACKS], "xx", [2]),
    ],
)
def test_one_rank_for_each_folder_and_key_keeps_a_record(
    tickets: list[LookupResult | None], folders: str, keepers: list[int]
):
    """Those that have not met the site do not know its key."""
    assert told(*tickets, folders=folders).writers == {"s": keepers}


def test_what_is_known_is_what_the_first_rank_knows():
    """A later rank's counts for sites that the first has not met."""
    one, other = (PriorTimes({0: Times(ms, 1.0)}, 0) for ms in (1.0, 2.0))
    got = reduce_manifests(
        {0: RankManifest(prior={"s": one}), 1: RankManifest(prior={"s": other, "t": other})}
    )
    assert got.prior == {"s": one, "t": other}


def test_a_recalled_site_is_not_rehearsed():
    """Others whose candidates cannot be compiled ahead are."""
    sites = {"s": digest([]), "t": digest([])}
    got = reduce_manifests(
        {0: RankManifest(sites, lookups={"s": HAS_A, "t": LACKS}, warm_ups={"s": 1, "t": 2})}
    )
    assert (list(got.cached), got.warm_ups) == (["s"], {"t": 2})


@pytest.mark.parametrize(
    ("sites", "watched", "expected"),
    [
        ("ss", "nn", True),
        ("ss", "yn", False),
        ("sn", "nn", False),
        ("nn", "nn", False),
        ("sn", "yy", True),
        ("nn", "yn", False),
        ("nn", "yy", True),
    ],
)
def test_hits_before_a_common_miss_do_not_matter(sites: str, watched: str, expected: bool):
    """All ranks were in the midst of the same call: what they have hit in it they have in common
    from before.
    """
    calls = {
        rank: RankManifest({"s": digest([])} if site == "s" else {}, is_watched=heard == "y")
        for rank, (site, heard) in enumerate(zip(sites, watched, strict=True))
    }
    assert reduce_manifests(calls).is_watched is expected


def test_compile_threads_are_those_of_the_host_with_the_most():
    """All ranks decide by eight."""
    assert (
        reduce_manifests(
            {rank: RankManifest(n_threads=n) for rank, n in enumerate((8, 8, 6))}
        ).n_threads
        == 8
    )


@pytest.mark.parametrize("why", ["", "changes x"])
def test_a_collective_that_left_ranks_alone_is_no_reason_beside_another_one(why: str):
    """Else the group has broken, and the seconds of each rank's run are told."""
    left = "is left alone in a collective when it runs again: not tuned"
    first = RankManifest({"s": ""}, run_s=3.0, why_not=left)
    second = RankManifest({"s": ""}, run_s=4.0, why_not=why)
    assert reduce_manifests({0: first, 1: second}).left_s == ({} if why else {0: 3.0, 1: 4.0})
