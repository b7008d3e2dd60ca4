"""The page in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.report import render, story_of_folder
from tests.report.browser import needs_chromium, opened
from tests.report.stories import write_story

pytestmark = [pytest.mark.once, pytest.mark.processes, needs_chromium]

CLICKS = """
const table = document.querySelector("table.sortable");
const names = [...table.tHead.rows[0].cells].map(each => each.textContent);
const column = name => [...table.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[names.indexOf(name)].textContent);
const click = name => table.tHead.rows[0].cells[names.indexOf(name)].querySelector("button").click();
seen.loaded = column("ms");
click("ms"); click("ms"); seen.down = column("ms");
click("#"); seen.index = column("#");
click("outcome"); seen.fates = column("outcome");
const filter = table.closest("details").querySelector("input");
filter.value = "DROPPED OutOf"; filter.dispatchEvent(new Event("input")); seen.dropped = column("outcome");
seen.links = [...document.querySelectorAll("a[href^='#']")].map(link => {
  const site = document.getElementById(link.hash.slice(1));
  site.open = false; link.click(); return site.open;
});
document.querySelectorAll("details").forEach(each => { each.open = true; });
seen.width = document.documentElement.scrollWidth; seen.window = innerWidth;
"""


def test_sorting_filtering_and_links_work_on_a_phone(tmp_path: Path):
    """390 pixels wide, nothing on the console, and the page itself does not scroll sideways."""
    write_story(tmp_path / "logs", 3, 60)
    page = render(story_of_folder(tmp_path / "logs"))
    seen, console = opened(page, tmp_path, CLICKS, width=390)
    assert console == []
    times = [float(each) for each in seen["down"] if each]
    assert times == sorted(times, reverse=True)
    assert seen["loaded"] != seen["down"]
    assert seen["down"][len(times) :] == [""] * (60 - len(times)), "what has no time comes last"
    assert seen["index"] == [str(k) for k in range(60)]
    assert seen["fates"] == sorted(seen["fates"])
    assert set(seen["dropped"]) == {"dropped"}
    assert 0 < len(seen["dropped"]) < 60
    assert seen["links"] == [True] * 3
    assert (seen["window"], seen["width"]) == (390, 390)


@pytest.mark.slow
def test_an_error_of_the_page_would_be_seen(tmp_path: Path):
    """The console is read, and what the policy forbids is told there."""
    write_story(tmp_path / "logs", 1, 6)
    script = "fetch('http://127.0.0.1:9/'); throw new Error('seen')"
    console = opened(render(story_of_folder(tmp_path / "logs")), tmp_path, script)[1]
    assert any("seen" in line for line in console)
    assert any("Content Security Policy" in line for line in console)
