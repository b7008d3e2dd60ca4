"""The page as text: self-contained, escaped, small."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from dist_tune.output.events import Told
from dist_tune.report import Story, progress_lines, render, story_of_folder, story_of_records, summary, text
from dist_tune.report.overview import headline, messages, overview
from tests.cached_records import candidate
from tests.cached_records import record as small_record
from tests.report.stories import FORGED, events, header, record, write_story

pytestmark = pytest.mark.once


class Elements(HTMLParser):
    """Names of all elements of a page, and the values of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.values: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.values += [value for _, value in attrs if value]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("logs")
    write_story(folder, n_sites=20, n_candidates=200)
    return story_of_folder(folder)


@pytest.fixture(scope="module")
def page(story: Story) -> str:
    return render(story)


def test_twenty_sites_of_200_candidates_take_less_than_2_mb(page: str):
    """On four ranks, with all charts and a row for each candidate."""
    assert len(page.encode()) < 2_000_000
    assert page.count("<tr") >= 20 * 200
    assert page.count("<svg") == 3 + 20 * 10


def test_the_page_needs_nothing_from_outside(page: str):
    """Styles and scripts are inside, and its policy forbids all else."""
    assert not re.search(r"""(?:src|href)=(?!["']?(?:#|data:,))""", page)
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page


def test_texts_of_unknown_origin_are_escaped():
    """Kernel names, keys, configs, reasons, hosts, commands, messages."""
    fields = {FORGED: FORGED, "B": 1}
    candidates = [candidate(i, config=f"{FORGED} {i}", fields=fields | {"B": i}, left=FORGED, failure=None) for i in range(3)]
    candidates.append(candidate(3, fields=fields | {FORGED: "other"}, failure=f"rank 0: {FORGED}"))
    forged = small_record(candidates=candidates, kernel=FORGED, key=FORGED, closure=FORGED)
    told = Story()
    for rank in range(2):
        for event in events([forged], rank, 2):
            told.take(event)
    told.take(header(0, 2, host=FORGED, device=FORGED, command=[FORGED], date=FORGED, versions={FORGED: FORGED}))
    told.notes.append(FORGED)
    for each in (story_of_records([forged]), told):
        elements = Elements(render(each))
        assert elements.names.count("script") == 1
        assert not [value for value in elements.values if value.startswith("javascript")]


def test_control_characters_do_not_reach_the_page():
    """Nor the terminal."""
    told = story_of_records([small_record(kernel="gemm\x1b[31m\u202e")])
    for output in (render(told), text(told)):
        assert not re.search("[\x1b\u202e]", output)


def test_the_page_tells_of_the_winner_and_the_ranks(page: str):
    for words in (
        "1.43x",
        "rank 3 (4 of 4 meetings",
        "ahead of the next kernel",
        "cannot run here (shared memory)",
        "NVIDIA H200",
        "explains",
        "Time line by rank",
    ):
        assert words in page, words


def test_two_tunings_of_one_closure_are_told_apart():
    """By the number of the call: two batch sizes of one step are tuned one after the other."""
    told = Story()
    for number in (1, 4):
        for event in list(events([record(number, 12)], 0, 1, name=f"train.step, call {number}"))[1:]:  # without a header
            told.take(event)
    facts = dict(headline(told).facts)
    assert facts["step, call 1"].startswith("step 2.31 ms with the first configs")
    assert "; took 14.2 s" in facts["step, call 4"]
    assert headline(told).title == "step"
    assert all(text in render(told) for text in ("<h3>step, call 1</h3>", "<h3>step, call 4</h3>"))


def test_what_all_ranks_say_is_said_once():
    """With the numbers of the ranks."""
    told = Story()
    for rank in range(3):
        told.take(Told(at=0.0, rank=rank, tuning="step, call 1", level="WARNING", text="the disk is full"))
    told.take(Told(at=0.0, rank=2, tuning="step, call 1", level="ERROR", text="gone"))
    assert messages(told, 10) == ["ranks 0, 1, 2, WARNING: the disk is full", "rank 2, ERROR: gone"]


def test_a_first_config_that_cannot_run_is_no_blank_gain():
    """The gain over it is unknown, and the page says why."""
    given = record(1, 40)
    assert given.candidates[0].failure is not None
    told = story_of_records([given])
    assert overview(told)[0].gain_text == "first config fails"
    assert "first config fails" in render(told)


def test_the_table_says_how_much_slower_a_candidate_is():
    """As a multiple of the winner's time; nothing where there is no time."""
    rows = [candidate(0, latency_ms=0.2), candidate(1, latency_ms=0.1), candidate(2, latency_ms=None, failure="rank 0: x")]
    page = render(story_of_records([small_record(candidates=rows, winner=1)]))
    assert "<button>x winner</button>" in page
    body = page[page.index('class="sortable"') :]
    assert [re.findall(r"<td[^>]*>([^<]*)", row)[2].strip() for row in body.split("<tr")[2:5]] == ["1.00", "2.00", ""]


def test_names_of_thousands_of_letters_do_not_fill_the_page():
    """A site's heading and the page's title end with an ellipsis; the table of winners, too."""
    name = "k" * 5000
    page = render(story_of_records([record(0, 12, kernel=name, key=f"[{'9,' * 2500}]", closure=name)]))
    headings = re.findall(r"<(?:h1|title|summary)[^>]*>(.*?)</", page, re.DOTALL)
    assert max(map(len, headings)) < 300


def test_a_site_that_is_not_settled_is_on_the_page():
    """With what the race knows."""
    told = Story()
    for event in events([record(0, 12)], 0, 1):
        if event.kind not in ("winner", "done"):
            told.take(event)
    page = render(told)
    assert "not settled; best so far: BLOCK_M=" in page
    assert summary(told)["sites"][0]["winner"] == ""
    assert "not settled" in text(told)


def test_the_text_tells_the_same(story: Story):
    """A few lines for each site."""
    told = text(story)
    assert told.startswith("Tuning of step\n")
    assert told.count("matters most: BLOCK_M") == 20
    assert len(summary(story)["sites"]) == 20


def test_messages_name_sites_as_the_rest_of_the_page():
    """A label of 250 characters fills three rows of a page."""
    told = Story()
    for event in events([record(1, 6)], 0, 1):
        told.take(event)
    (label,) = next(iter(told.tunings.values())).sites
    told.take(Told(at=0.0, rank=0, tuning="step#1", level="WARNING", text=f"site={label} is tuned: it differs in source"))
    line = "rank 0, WARNING: gemm_1 [1024, 2752] is tuned: it differs in source"
    assert messages(told, 10) == [line]
    assert progress_lines(told, 0.0)[-1] == line


def test_several_tunings_are_a_table_and_their_sites_stand_apart():
    """Ten calls of one step have the same eleven sites: each once below the name of its call, and not by a label of 250 characters."""
    told = Story()
    for number in (1, 2):
        for event in list(events([record(1, 12)], 0, 1, name=f"train.step, call {number}"))[1:]:
            told.take(event)
    assert [(row.label, row.tuning) for row in overview(told)] == [("gemm_1 [1024, 2752]", f"step, call {n}") for n in (1, 2)]
    page = render(told)
    assert page.count('<tr class="tuning">') == 2
    assert "<h2>Tunings</h2>" in page
    assert "<dt>step, call 1</dt>" not in page
    assert "\nstep, call 2:\n" in text(told)


def test_a_gain_below_one_is_told_in_words():
    rows = [candidate(0, latency_ms=0.19), candidate(1, latency_ms=0.2)]
    given = story_of_records([small_record(candidates=rows, winner=1)])
    assert "5 % slower than the first config by its kernel (0.19 ms)" in text(given)
    assert "5 % slower than the first config by its kernel (0.19 ms)" in render(given)
