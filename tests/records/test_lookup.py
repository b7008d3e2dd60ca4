"""What one rank says of its cache, what it keeps, why no record fits, and which comes nearest;
without any ranks.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.log import Story
from dist_tune.records.lookup import CacheLookup, LookupResult, explain, nearest, nearest_usable
from dist_tune.records.record import CacheKey, TuningRecord
from dist_tune.records.record import environment as environment_here
from dist_tune.records.store import Cache, Won
from dist_tune.settings import Settings
from tests.cached_records import NOON, candidate, environment, record

TEXTS = [each.config for each in record().candidates]
NAMED = ("model.gemm", "[4096,2752,torch.bfloat16]")
SITE = "model.gemm[4096,2752,torch.bfloat16]"
SOURCE = "0123456789abcdef"
HERE = environment_here(2, 2)
UNMEASURED = [candidate(i, latency_ms=None, closure_ms=None, n_replays=0) for i in range(3)]


def lookup(folder: Path, log: Any = None, *, is_used: bool = True, **settings: Any) -> CacheLookup:
    values = {"cache_dir": str(folder), "cache_path": "", **settings}
    made = Settings.model_construct(**{**Settings().model_dump(), **values})
    return CacheLookup(
        made, log or mock.Mock(Story), is_used=is_used, world_size=2, ranks_per_host=2
    )


def found(**changes: Any) -> TuningRecord:
    """A record of this machine."""
    return record(**{"environment": HERE, **changes})


def kept(folder: Path, *records: TuningRecord) -> Path:
    for each in records:
        assert Cache(folder).store(each) is not None
    return folder


def look_up(
    mine: CacheLookup,
    texts: list[str] = TEXTS,
    named: tuple[str, str] = NAMED,
    source: str = SOURCE,
) -> Any:
    return mine.look_up(SITE, named, lambda: source, texts)


def asked(mine: CacheLookup) -> tuple[TuningRecord | None, LookupResult]:
    """What it finds of the site, and what it tells the others."""
    one = look_up(mine)
    return one, mine.ticket(SITE, one)


def test_what_was_kept_is_found(tmp_path: Path):
    """By the next job, which tells its key and the winner; and that it will not use the record,
    where its config does not run.
    """
    first, next_job = lookup(tmp_path), lookup(tmp_path)
    nothing, miss = asked(first)
    assert (nothing, miss) == (None, LookupResult(miss.key))
    first.keep(found())
    one, ticket = asked(next_job)
    assert (one, ticket) == (found(), LookupResult(miss.key, TEXTS[1]))
    assert next_job.ticket(SITE, one, runs=False) == ticket._replace(is_open=False)
    assert (first.source(SITE), lookup(tmp_path).source(SITE)) == (SOURCE, "")


@pytest.mark.parametrize(
    ("named", "source", "texts", "differing", "is_stale"),
    [
        (("model.gemm", "[1]"), SOURCE, TEXTS, ["key: [1] here"], False),
        (("model.gemm", "[1]"), SOURCE, TEXTS[:2], ["key: [1] here", "candidates"], False),
        (("model.gemm", "[1]"), "f" * 16, TEXTS, ["source", "key: [1] here"], True),
        (NAMED, SOURCE, TEXTS[:2], ["candidates"], True),
        (("other.gemm", NAMED[1]), SOURCE, TEXTS, ["There is no record of other.gemm."], False),
        (NAMED, SOURCE, TEXTS, ["that fits"], False),
    ],
)
def test_a_miss_tells_a_new_shape_from_a_record_that_does_not_count(
    tmp_path: Path,
    named: tuple[str, str],
    source: str,
    texts: list[str],
    differing: list[str],
    is_stale: bool,
):
    """Prune rules may leave another list for another shape; another code, version or device is no
    matter of the shape.
    """
    mine = lookup(kept(tmp_path, found()))
    look_up(mine, texts, named, source)
    miss = mine.reason_of_miss(SITE)
    assert ([each for each in differing if each not in miss.reason], miss.is_stale) == (
        [],
        is_stale,
    )


def test_a_rank_that_shall_tune_finds_nothing_and_says_so(tmp_path: Path):
    """It tells its key, under which it will keep what comes of it; without a cache no key, and
    nothing is touched.
    """
    _, ticket = asked(lookup(kept(tmp_path, found())))
    mine = lookup(tmp_path, always_tune=True)
    assert asked(mine) == (None, LookupResult(ticket.key, is_open=False))
    assert mine.prior_times(SITE, TEXTS[:2]).times == {}
    mine = lookup(tmp_path / "cache", is_used=False)
    assert asked(mine) == (None, LookupResult("", is_open=False))
    mine.keep(found())
    assert (mine.folder, mine.source(SITE), mine.prior_times(SITE, TEXTS).times) == ("", "", {})
    one, other = lookup(tmp_path / "cache"), lookup(tmp_path / "cache")
    assert (one.folder, (tmp_path / "cache").exists()) == (
        "",
        False,
    ), "nothing is made before a look-up"
    asked(one)
    asked(other)
    assert one.folder == other.folder != ""


def test_other_software_is_overlooked_with_a_warning(tmp_path: Path):
    """Where that was asked for: the versions of the record and those here."""
    kept(tmp_path, found(environment=HERE.model_copy(update={"torch": "1.0", "triton": "2.7"})))
    assert asked(lookup(tmp_path))[0] is None
    log = mock.Mock(Story)
    assert asked(lookup(tmp_path, log, version_check=False))[0] is not None
    (told,), shown = log.warning.call_args
    assert shown == {"shown": True}
    assert (
        f"tuned with torch 1.0, here {HERE.torch}, triton 2.7, here {HERE.triton}"
        " (DIST_TUNE_VERSION_CHECK=0)" in told
    )


HOURS = [found().tuned_at.replace(hour=hour) for hour in (20, 22)]
DAMAGED = [
    candidate(0, latency_ms=None, failure="rank 1: no"),
    candidate(1),
    candidate(2, latency_ms=0.0),
    candidate(3, closure_ms=None),
]
SMALL = found(candidates=[candidate(0), candidate(1)], tuned_at=HOURS[0])


@pytest.mark.parametrize(
    ("records", "texts", "times_ms", "winner"),
    [
        # By their description, whatever their order is now
        ([found()], ["new", TEXTS[2], TEXTS[1]], {1: 2.1, 2: 1.1}, 2),
        ([found()], [TEXTS[0], "new"], {0: 0.1}, None),  # without its winner
        # What failed or was not measured is not known; nor is a time of zero, which no clock gives
        # and a file may hold.
        ([found(candidates=DAMAGED)], [*(each.config for each in DAMAGED), "new"], {1: 1.1}, 1),
        # The one that knows most: a winner has beaten those of its own list, and no others. Of
        # equals the newest.
        ([SMALL, found(winner=2)], [*TEXTS, "new"], {0: 0.1, 1: 1.1, 2: 2.1}, 2),
        (
            [
                SMALL,
                found(winner=2),
                found(
                    candidates=[candidate(i, latency_ms=5.0) for i in range(4)],
                    winner=0,
                    tuned_at=HOURS[1],
                ),
            ],
            [*TEXTS, "new"],
            {0: 5.0, 1: 5.0, 2: 5.0},
            0,
        ),
    ],
)
def test_times_of_another_list_are_known(
    tmp_path: Path,
    records: list[TuningRecord],
    texts: list[str],
    times_ms: dict[int, float],
    winner: int | None,
):
    """With all that is needed to keep them in the new record."""
    mine = lookup(kept(tmp_path, *records))
    look_up(mine, texts)
    prior = mine.prior_times(SITE, texts)
    assert ({i: times.kernel_ms for i, times in prior.times.items()}, prior.winner) == (
        times_ms,
        winner,
    )
    (i, times), original = (
        next(iter(prior.times.items())),
        {each.config: each for each in records[-1].candidates},
    )
    kept_of = original[texts[i]]
    assert (times.closure_ms, times.spread_ms, times.n_replays) == (
        kept_of.closure_ms,
        kept_of.spread_ms,
        kept_of.n_replays,
    )
    assert times.rank_latencies_ms == kept_of.rank_latencies_ms


def test_a_choice_is_kept_only_if_it_was_measured(tmp_path: Path):
    """One that nothing is known of would be taken for a result for ever; where one alone runs there
    was no choice.

    What is kept has an id, the beginning of its file's name and of no other's: also where the
    version of Triton alone differs.
    """
    mine, older = lookup(tmp_path), HERE.model_copy(update={"triton": "3.0.0"})
    alone = found(candidates=[candidate(0, latency_ms=None, failure="rank 0: no"), UNMEASURED[1]])
    some = found(candidates=[candidate(0), UNMEASURED[1], candidate(2)])
    for each in (found(candidates=UNMEASURED), some, found(source="")):
        assert (mine.keep(each), mine.record_id(each)) == (False, "")
    assert Cache(tmp_path).entries() == []
    for each in (alone, found(), found(environment=older), found(key="[1]")):
        assert mine.keep(each)
        assert (
            len(
                [
                    path
                    for path in tmp_path.glob("*/*.json")
                    if path.stem.startswith(mine.record_id(each))
                ]
            )
            == 1
        )


# -- keys that differ ------------------------------------------------------------------------------


def wanted(**changes: Any) -> CacheKey:
    return record(**changes).cache_key


def test_the_nearest_record_differs_in_the_fewest_fields():
    """Of equals the newest; a record of another kernel is near nothing."""
    far = record(source="x", environment=environment(triton="3.9.0"))
    near = [record(source="x", tuned_at=NOON + timedelta(days=day)) for day in (0, 2, 1)]
    for records, chosen in (
        ([far, *near], near[1]),
        ([far], far),
        ([record(kernel="other")], None),
        ([], None),
    ):
        assert nearest(wanted(), records) == chosen


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (
            {"environment": environment(triton="3.9.0")},
            "triton: 3.6.0 here, 3.9.0 in the record. DIST_TUNE_VERSION_CHECK=0 accepts it.",
        ),
        (
            {"environment": environment(cuda=None, torch="2.9")},
            "torch: 2.13.0 here, 2.9 in the record; cuda: 13.0 here, None in the record.",
        ),
        ({"environment": environment(world_size=8)}, "world_size: 4 here, 8 in the record."),
        ({"source": "x"}, "source: the code of model.gemm, or of something it calls, has changed."),
        ({"n_candidates": 5}, "candidates: the list of configs to choose from is another."),
        (
            {"key": "x" * 1000},
            "key: [4096,2752,torch.bfloat16] here, " + "x" * 120 + "... in the record.",
        ),
        ({"source": "x", "key": "[1]"}, "has changed; key: [4096"),
    ],
)
def test_an_explanation_names_what_differs(recorded: dict[str, Any], reason: str):
    """With both values where a person can compare them, and with what to do where something can be
    done.
    """
    text = explain(wanted(), [record(**recorded)])
    assert text.startswith(
        "The nearest record of model.gemm (tuned 2026-03-01 12:00 UTC) differs in "
    )
    assert reason in text
    assert ("VERSION_CHECK" in text) == (
        set(recorded) == {"environment"} and "world_size" not in text
    )
    assert explain(wanted(), [record(kernel="other")]) == "There is no record of model.gemm."
    assert explain(wanted(), [record(), record(source="x")]).startswith(
        "There is a record of model.gemm that fits (tuned 2026"
    )


def won(**recorded: Any) -> Won:
    kept = record(**recorded)
    return Won(kept.cache_key, kept.best.config, kept.tuned_at)


def shape_of(key: str, *others: str) -> str | None:
    found = nearest_usable(wanted(key=key), [won(key=other) for other in others], TEXTS)
    return None if found is None else found.cache_key.key


@pytest.mark.parametrize(
    ("key", "others", "chosen"),
    [
        ("[4096,4096]", ["[1024,4096]", "[8192,4096]", "[4096,512]"], "[8192,4096]"),
        ("[4096,4096]", ["[2048,2048]", "[4000,2048]", "[16384,4096]"], "[4000,2048]"),
        ("[100]", ["[50]", "[190]"], "[190]"),
        ("[100]", ["[100]", "[101]"], "[100]"),
        ("[0,64]", ["[1,64]", "[0,32]", "[0,4]"], "[0,32]"),
        ("[-1]", ["[8]", "[-2]"], "[-2]"),
        ("[1e-05]", ["[1e-06]", "[1.0]", "[1e-09]"], "[1e-06]"),
        (f"[{10**200}]", ["[1]", f"[{10**199}]", f"[-{10**200}]"], f"[{10**199}]"),
        ("[1e999]", ["[1e999]", "[1.0]", "[0.0]"], "[1e999]"),
        ("<=1024", ["<=64", "<=512"], "<=512"),
    ],
)
def test_the_nearest_shape(key: str, others: list[str], chosen: str):
    """By factors: half as large is as far as twice as large.

    Zeros, signs and numbers of any size are no error.
    """
    assert shape_of(key, *others) == shape_of(key, *reversed(others)) == chosen


@pytest.mark.parametrize(
    ("key", "other"),
    [
        *(
            (f"[64,{one}]", f"[64,{other}]")
            for one, other in [
                ("torch.float16", "torch.float32"),
                ("cuda:0", "cuda:1"),
                ("sm_90", "sm_100"),
                ("'2'", "'4'"),
                ('"2 x"', '"4 x"'),
                ("True", "False"),
                ("1", "1.0"),
                ("0x10", "0x20"),
                ("v1.2", "v1.3"),
                ("x", "<integer>"),
            ]
        ),
        *(
            ("[-1]", "[1]"),
            ("[64]", "[64,64]"),
            ("[64]", "(64)"),
            ("[64]", "[]"),
            ("[" + "1" * 5000 + "]", "[2]"),
        ),
    ],
)
def test_other_keys_are_no_shapes_of_this_one(key: str, other: str):
    """Digits in a word or in quotes tell kinds apart, not sizes; another type or number of sizes is
    another kind.
    """
    assert (shape_of(key, other), shape_of(other, key), shape_of(key, key)) == (None, None, key)


def test_a_near_shape_is_of_the_same_code_and_the_newest_of_equals():
    """First the same hardware, then the nearest numbers, then the same versions.

    Its winner must be one of the candidates.
    """

    def best(*records: Won) -> Won | None:
        found = nearest_usable(wanted(key="[64]"), records, TEXTS)
        assert found is nearest_usable(wanted(key="[64]"), records[::-1], TEXTS)
        return found

    near, newer, far = (
        won(key=key, tuned_at=NOON + timedelta(days=day))
        for key, day in (("[32]", 0), ("[32]", 1), ("[512]", 2))
    )
    elsewhere, older = (
        won(key="[64]", environment=environment(device="x")),
        won(key="[32]", environment=environment(torch="x")),
    )
    assert best(near, newer, far) == best(newer, older) == newer
    assert (best(elsewhere, far), best(elsewhere, older), best(elsewhere)) == (
        far,
        older,
        elsewhere,
    )
    alone = won(key="[512]", environment=environment(world_size=1, ranks_per_host=1))
    # Tuned on one GPU, served on several.
    assert (best(elsewhere, alone), best(alone, far)) == (alone, far)
    assert (
        best(won(key="[64]", source="x"))
        is nearest_usable(wanted(key="[64]"), [near], TEXTS[:0])
        is None
    )


@given(st.text("0123456789.+-eE'\"\\:,[] \nfx٣", min_size=1, max_size=60))
def test_any_text_is_a_key(key: str):
    """No key is an error, and each is nearest to itself."""
    assert shape_of(key, "0", key) in (key, "0")


@pytest.mark.parametrize(
    "key",
    [
        "'\\" * 50_000,
        "'\"" * 50_000 + "'",
        "1" * 100_000,
        "1.e" * 50_000,
        "-" * 100_000,
        "a:" * 50_000,
    ],
)
def test_a_long_key_takes_no_long_time(key: str):
    """Files may hold any text; reading a key takes time in proportion to its length."""
    began = time.thread_time()
    shape_of(key, key + "x")
    assert time.thread_time() - began < 10
