"""The page and the text: self-contained, escaped, small. Data is read as the browser reads it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import triton

from dist_tune.configs import config_fields
from dist_tune.log.events import Told, TuningBegun, TuningEnded
from dist_tune.report import Story, render, story_of_folder, story_of_records, summary, text
from dist_tune.report.facts import python_config
from tests.cached_records import candidate
from tests.cached_records import record as small_record
from tests.report.stories import FORGED, events, header, record, write_story


def content(story: Story) -> dict[str, Any]:
    """The JSON that a page embeds."""
    found = re.search(
        r'<script id="story" type="application/json">(.*?)</script>', render(story), re.DOTALL
    )
    assert found is not None
    return dict(json.loads(found[1]))


def story_of(*told: Any) -> Story:
    story = Story()
    for each in told:
        story.take(each)
    return story


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("logs")
    write_story(folder, n_sites=20, n_candidates=200)
    return story_of_folder(folder)


def test_the_page_of_twenty_sites_takes_less_than_2_mb_and_needs_nothing_from_outside(story: Story):
    """With all that is known of 200 candidates each on four ranks.

    Styles and scripts are inside, and its policy forbids all else.
    """
    page = render(story)
    assert len(page.encode()) < 2_000_000
    assert not re.search(r"""(?:src|href)=(?!["']?(?:#|data:,))""", page)
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page
    assert [len(site["candidates"]) for site in content(story)["sites"]] == [200] * 20


def test_the_page_tells_of_the_winner_and_the_ranks(story: Story):
    """The step before and after, each candidate with its ranks, its reason and its config."""
    told = content(story)
    assert told["machine"]["ranks"] == "4 ranks, NVIDIA H200"
    (tuning,) = told["tunings"]
    assert (tuning["first_ms"], tuning["best_ms"]) == (2.31, 1.62)
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
    lines = text(story).splitlines()
    assert (lines[0], [lines.count(each["label"]) for each in told["sites"]]) == (
        "Tuning of step",
        [1] * 20,
    )
    assert f"  chosen: {site['facts']['chosen']}" in lines


def test_texts_of_unknown_origin_are_no_html_and_do_not_fill_the_page():
    """Kernel names, keys, configs, reasons, hosts, commands, messages: the page has the elements of
    its template alone.
    """
    fields = {FORGED: FORGED, "B": 1}
    candidates = [
        candidate(i, config=f"{FORGED} {i}", fields=fields | {"B": i}, left=FORGED, failure=None)
        for i in range(3)
    ]
    candidates.append(candidate(3, fields=fields | {FORGED: "other"}, failure=f"rank 0: {FORGED}"))
    forged = small_record(
        candidates=candidates, kernel=FORGED, key=FORGED, closure=FORGED, reason=FORGED
    )
    told = story_of(*(event for rank in range(2) for event in events([forged], rank, 2)))
    told.take(
        header(
            0,
            2,
            host=FORGED,
            device=FORGED,
            command=[FORGED],
            date=FORGED,
            versions={FORGED: FORGED},
        )
    )
    told.take(Told(at=0.0, rank=0, tuning="step#1", level=FORGED, text=f"{FORGED}<!-- --><script>"))
    told.notes.append(FORGED)
    for each in (story_of_records([forged]), told):
        assert render(each).count("<") == render(Story()).count("<")
        assert FORGED in content(each)["sites"][0]["candidates"][0]["cells"][-1]
    odd = story_of_records([small_record(kernel="gemm\x1b[31m\u202e")])
    assert not re.search("[\x1b\u202e]", render(odd) + text(odd))
    name = "k" * 5000
    long = content(
        story_of_records([record(0, 12, kernel=name, key=f"[{'9,' * 2500}]", closure=name)])
    )
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
    """By the number of the call: ten calls of one step have the same eleven sites, and each is told
    once below the name of its call.
    """
    told = story_of(
        *(
            event
            for n in (1, 4)
            for event in list(events([record(1, 12)], 0, 1, name=f"train.step, call {n}"))[1:]
        )
    )
    assert summary(told)["title"] == "step"
    assert [(row["label"], row["tuning"]) for row in summary(told)["sites"]] == [
        ("gemm_1 [1024, 2752]", f"step, call {n}") for n in (1, 4)
    ]
    assert [each["name"] for each in content(told)["tunings"]] == ["step, call 1", "step, call 4"]
    assert "  step, call 1, step: 2.31 ms with the first configs" in text(told)
    assert "\nstep, call 4:\n" in text(told)


def test_what_all_ranks_say_is_said_once_and_names_sites_as_the_rest_of_the_page():
    """With the numbers of the ranks; a label of 250 characters fills three rows of a page."""
    told = story_of(*events([record(1, 6)], 0, 1))
    ((_, _, site),) = told.sites
    for rank in range(3):
        told.take(
            Told(
                at=0.0,
                rank=rank,
                tuning="step#1",
                level="WARNING",
                text=f"site={site.met.label} is tuned: it differs in source",
            )
        )
    told.take(Told(at=0.0, rank=2, tuning="step#1", level="ERROR", text="gone"))
    lines = [
        "ranks 0, 1, 2, WARNING: gemm_1 [1024, 2752] is tuned: it differs in source",
        "rank 2, ERROR: gone",
    ]
    assert content(told)["notes"] == lines


def test_a_site_that_is_not_settled_is_on_the_page():
    """With what the race knows: before its first rung how many candidates there are."""
    all_told = events([record(0, 12)], 0, 1)
    begun = [event for event in all_told if event.kind not in ("winner", "done")]
    (site,) = content(story_of(*(event for event in begun if event.kind != "rung")))["sites"]
    assert site["facts"]["chosen"] == "not yet: 12 candidates, 2 dropped"
    told = story_of(*begun)
    (site,) = content(told)["sites"]
    assert site["facts"]["chosen"].startswith("not yet: 24 of 12 left, best so far 0.1")
    assert (site["candidates"], "not yet" in text(told)) == ([], True)


def test_seconds_by_phase():
    """Meetings are a part of the phases."""
    told = story_of(TuningBegun(at=0.0, rank=0, tuning="t", closure="step", world_size=1))
    told.take(
        TuningEnded(
            at=1.0,
            rank=0,
            tuning="t",
            seconds={"total": 10.0, "compile": 6.0, "race": 3.0, "meetings": 2.0},
            n_replays=1,
        )
    )
    assert (
        "  took: 10.0 s (compile 6.0, race 3.0, other 1.0), 1 replay\n  waits: 2.00 s, a part of"
        " the phases\n" in text(told)
    )
