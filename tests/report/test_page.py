"""The page and the text: self-contained, escaped, small. Data is read as the browser reads it."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
import triton

from dist_tune.configs import config_fields
from dist_tune.records import TuningRecord
from dist_tune.records.record import Seconds
from dist_tune.report import latest, render, summary, text, tunings_of
from dist_tune.report.page import python_config
from tests.cached_records import NOON, candidate
from tests.cached_records import record as small_record
from tests.report.stories import FORGED, record


def content(tunings: list[list[TuningRecord]]) -> dict[str, Any]:
    """The JSON that a page embeds."""
    found = re.search(
        r'<script id="story" type="application/json">(.*?)</script>', render(tunings), re.DOTALL
    )
    assert found is not None
    return dict(json.loads(found[1]))


@pytest.fixture(scope="module")
def tunings() -> list[list[TuningRecord]]:
    return tunings_of(record(number, 200) for number in range(20))


def test_the_page_of_twenty_sites_takes_less_than_2_mb_and_needs_nothing_from_outside(
    tunings: list[list[TuningRecord]],
):
    """With all that is known of 200 candidates each on four ranks.

    Styles and scripts are inside, and its policy forbids all else.
    """
    page = render(tunings)
    assert len(page.encode()) < 2_000_000
    assert not re.search(r"""(?:src|href)=(?!["']?(?:#|data:,))""", page)
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page
    assert [len(site["candidates"]) for site in content(tunings)["sites"]] == [200] * 20


def test_the_page_tells_of_the_winner_and_the_ranks(tunings: list[list[TuningRecord]]):
    """The step before and after, each candidate with its ranks, its reason and its config."""
    told = content(tunings)
    assert told["machine"]["on"] == "4 ranks on 4 x NVIDIA H200"
    (tuning,) = told["tunings"]
    assert tuning["best_ms"] == min(record(k).best.closure_ms or 0.0 for k in range(20))
    site = told["sites"][0]
    best, *others = site["candidates"]
    assert (best["is_best"], best["cells"][0], best["python"]) == (
        True,
        record(0).winner,
        python_config(record(0).best.fields),
    )
    assert [rank for rank, _ in best["ranks"]] == [0, 1, 2, 3]
    assert all(dict(zip(site["headings"], each["cells"], strict=True))["why"] for each in others)
    assert "cannot run here (shared memory)" in site["facts"]["candidates"]
    lines = text(tunings).splitlines()
    assert (lines[0], [lines.count(each["label"]) for each in told["sites"]]) == (
        "Tuning of step",
        [1] * 20,
    )
    assert f"  chosen: {site['facts']['chosen']}" in lines


def test_texts_of_unknown_origin_are_no_html_and_do_not_fill_the_page():
    """Kernel names, keys, configs, reasons: the page has the elements of its template alone."""
    fields = {FORGED: FORGED, "B": 1}
    candidates = [
        candidate(i, config=f"{FORGED} {i}", fields=fields | {"B": i}, left=FORGED, failure=None)
        for i in range(3)
    ]
    candidates.append(candidate(3, fields=fields | {FORGED: "other"}, failure=f"rank 0: {FORGED}"))
    forged = small_record(
        candidates=candidates, kernel=FORGED, key=FORGED, closure=FORGED, reason=FORGED
    )
    told = tunings_of([forged])
    assert render(told).count("<") == render([]).count("<")
    assert FORGED in content(told)["sites"][0]["candidates"][0]["cells"][-1]
    odd = tunings_of([small_record(kernel="gemm\x1b[31m\u202e")])
    assert not re.search("[\x1b\u202e]", render(odd) + text(odd))
    name = "k" * 5000
    of_name = record(0, 12, kernel=name, key=f"[{'9,' * 2500}]", closure=name)
    long = content(tunings_of([of_name]))
    assert max(map(len, (long["title"], long["sites"][0]["label"]))) < 300


@pytest.mark.parametrize(
    "config",
    [
        triton.Config(
            {"BLOCK_M": 128, "MODE": "a'b", "FAST": True}, num_warps=8, num_stages=3, num_ctas=2
        ),
        {
            "block": 4,
            "gemm": triton.Config({"BLOCK_M": 64}, num_warps=4, num_stages=2),
            "rate": 1.0,
            "name": None,
        },
    ],
)
def test_a_config_can_be_copied_as_python(config: Any):
    """What is copied makes the same config again; a hook, which is not copied, is named."""
    again = eval(python_config(config_fields(config)), {"triton": triton})  # its purpose
    assert config_fields(again) == config_fields(config)
    assert python_config({"B": 1, "num_warps": 4, "num_stages": 2, "pre_hook": "m.f"}).endswith(
        "num_stages=2)  # with pre_hook m.f"
    )


def test_two_tunings_of_one_closure_are_told_apart():
    """By a number: ten calls of one step have the same eleven sites, and each is told once below
    the name of its tuning.
    """
    told = tunings_of(record(1, 12, n_replays=n) for n in (420, 421))
    assert summary(told)["title"] == "step"
    assert [(row["label"], row["tuning"]) for row in summary(told)["sites"]] == [
        ("gemm_1 [1024, 2752]", f"step, tuning {n}") for n in (1, 2)
    ]
    assert [each["name"] for each in content(told)["tunings"]] == [
        "step, tuning 1",
        "step, tuning 2",
    ]
    assert "  step, tuning 1, took: 14.20 s (" in text(told)
    assert "\nstep, tuning 2:\n" in text(told)


def test_seconds_by_phase():
    """Waits for ranks are a part of the phases."""
    spent = Seconds(total=10.0, compile=6.0, race=3.0, meetings=2.0)
    told = text(tunings_of([record(0, 6, spent=spent, n_replays=1)]))
    assert "  took: 10.00 s (compile 6.00, race 3.00, waits 2.00), 1 replay\n" in told


def test_records_of_one_tuning_are_one_tuning():
    """They share the closure, its seconds and its replays; another tuning is told apart."""
    records = [record(0, 6), record(1, 6), record(2, 6, n_replays=3)]
    assert [len(each) for each in tunings_of(records)] == [2, 1]
    told = summary(tunings_of(records[:2]))
    assert told["title"] == "step"
    labels = ["gemm_0 [512, 2752]", "gemm_1 [1024, 2752]"]
    assert [each["label"] for each in told["sites"]] == labels


def test_two_sites_of_one_name_are_told_apart():
    """By their places."""
    told = summary(tunings_of([record(0, 6), record(0, 6)]))
    assert len({each["label"] for each in told["sites"]}) == 2


def test_the_latest_tuning_is_the_last_that_was_tuned():
    """The order in which records are found does not count."""
    late = record(0, 6, n_replays=3, tuned_at=NOON + timedelta(hours=1))
    assert latest([late, record(1, 6), record(2, 6)]) == [late]
    assert latest([]) == []
