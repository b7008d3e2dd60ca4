"""Why no record fits, and which comes nearest."""

import time
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache.lookup import explain, nearest, nearest_shape
from dist_tune.cache.records import CacheKey
from tests.cached_records import NOON, environment, record

pytestmark = pytest.mark.once


def wanted(**changes: Any) -> CacheKey:
    return record(**changes).cache_key


def test_the_nearest_record_differs_in_the_fewest_fields():
    """Of equals the newest; a record of another kernel is near nothing."""
    far = record(source="x", environment=environment(triton="3.9.0"))
    near = [record(source="x", tuned_at=NOON + timedelta(days=day)) for day in (0, 2, 1)]
    assert nearest(wanted(), [far, *near]) == near[1]
    assert nearest(wanted(), [far]) == far
    assert nearest(wanted(), [record(kernel="other")]) is None
    assert nearest(wanted(), []) is None


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        ({"environment": environment(triton="3.9.0")}, "triton: 3.6.0 here, 3.9.0 in the record. DIST_TUNE_VERSION_CHECK=0 accepts it."),
        (
            {"environment": environment(cuda=None, torch="2.9")},
            "torch: 2.13.0 here, 2.9 in the record; cuda: 13.0 here, None in the record.",
        ),
        ({"environment": environment(world_size=8)}, "world_size: 4 here, 8 in the record."),
        ({"source": "x"}, "source: the code of model.gemm, or of something it calls, has changed."),
        ({"n_candidates": 5}, "candidates: the list of configs to choose from is another."),
        ({"key": "[8192,1]"}, "key: [4096,2752,torch.bfloat16] here, [8192,1] in the record."),
        ({"key": "x" * 1000}, "key: [4096,2752,torch.bfloat16] here, " + "x" * 120 + "... in the record."),
        ({"source": "x", "key": "[1]"}, "has changed; key: [4096"),
    ],
)
def test_an_explanation_names_what_differs(recorded: dict[str, Any], reason: str):
    """With both values where a person can compare them, and with what to do where something can be done."""
    text = explain(wanted(), [record(**recorded)])
    assert text.startswith("The nearest record of model.gemm (tuned 2026-03-01 12:00 UTC) differs in ")
    assert reason in text
    assert explain(wanted(), [record(kernel="other")]) == "There is no record of model.gemm."
    assert explain(wanted(), [record(), record(source="x")]).startswith("There is a record of model.gemm that fits (tuned 2026")
    assert ("VERSION_CHECK" in text) == (set(recorded) == {"environment"} and "world_size" not in text)


def shape_of(key: str, *others: str) -> str | None:
    found = nearest_shape(wanted(key=key), [record(key=other) for other in others])
    return None if found is None else found.key


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
        ("[1e300]", ["[1e-300]", "[1e308]"], "[1e308]"),
        ("[1e999]", ["[1e999]", "[1.0]", "[0.0]"], "[1e999]"),
        ("<=1024", ["<=64", "<=512"], "<=512"),
    ],
)
def test_the_nearest_shape(key: str, others: list[str], chosen: str):
    """By factors: half as large is as far as twice as large. Zeros, signs and numbers of any size are no error."""
    assert shape_of(key, *others) == chosen
    assert shape_of(key, *reversed(others)) == chosen


@pytest.mark.parametrize(
    ("key", "other"),
    [
        *((f"[64,{one}]", f"[64,{other}]") for one, other in [
            ("torch.float16", "torch.float32"), ("cuda:0", "cuda:1"), ("sm_90", "sm_100"), ("'2'", "'4'"), ('"2 x"', '"4 x"'),
            ("True", "False"), ("1", "1.0"), ("0x10", "0x20"), ("v1.2", "v1.3"), ("x", "<integer>"),
        ]),
        *(("[-1]", "[1]"), ("[64]", "[64,64]"), ("[64]", "(64)"), ("[64]", "[]"), ("[" + "1" * 5000 + "]", "[2]")),
    ],
)  # fmt: skip
def test_other_keys_are_no_shapes_of_this_one(key: str, other: str):
    """Digits in a word or in quotes tell kinds apart, not sizes; another type or number of sizes is another kind."""
    assert shape_of(key, other) is None
    assert shape_of(other, key) is None
    assert shape_of(key, key) == key


@pytest.mark.parametrize("changes", [{"source": "x"}, {"n_candidates": 2}, {"environment": environment(torch="x")}, {"kernel": "x"}])
def test_a_shape_of_something_else_is_not_near(changes: dict[str, Any]):
    """All but the key must be equal: the winner must be one of the candidates, and its times of this machine."""
    assert nearest_shape(wanted(key="[64]"), [record(key="[32]", **changes)]) is None


def test_of_equally_near_shapes_the_newest():
    """Wherever it stands in the list."""
    records = [record(key=key, tuned_at=NOON + timedelta(days=day)) for key, day in (("[32]", 0), ("[128]", 2), ("[32]", 1))]
    assert nearest_shape(wanted(key="[64]"), records) == nearest_shape(wanted(key="[64]"), records[::-1]) == records[1]


@given(st.text("0123456789.+-eE'\"\\:,[] \nfx٣", max_size=60))
def test_any_text_is_a_key(key: str):
    """No key is an error, and each is nearest to itself."""
    assert shape_of(key, "0", key) in (key, "0")


@pytest.mark.parametrize("key", ["'\\" * 50_000, "'\"" * 50_000 + "'", "1" * 100_000, "1.e" * 50_000, "-" * 100_000, "a:" * 50_000])
def test_a_long_key_takes_no_long_time(key: str):
    """Files may hold any text; reading a key takes time in proportion to its length."""
    began = time.thread_time()
    nearest_shape(wanted(key=key), [record(key=key + "x")])
    assert time.thread_time() - began < 2
