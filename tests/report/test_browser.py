"""The page in a real browser, headless, where one is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from dist_tune.report import render, tunings_of
from tests.cached_records import candidate, record
from tests.report.stories import record as story_record

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    "",
)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed: apt-get install chromium"),
]
# A window is never narrower than 500 pixels; a frame may be as narrow as a phone.
FRAME = '<iframe width={} height=800 style="border:0" src="{}.html"></iframe>'
FRAMES = """<!doctype html>{}<script>
addEventListener("message", event => document.body.append(Object.assign(document.createElement("pre"), {{textContent: event.data}})));
</script>"""  # noqa: E501
TOLD = (
    "<script>(async () => {{ const seen = {{page: '{}'}}; {}"
    " parent.postMessage(JSON.stringify(seen), '*'); }})();</script>"
)
# What it does by itself, as asking for updates, takes time; and the tests may run as root.
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update
--disable-sync --hide-scrollbars --enable-logging=stderr --virtual-time-budget=10000 --dump-dom"""  # noqa: E501


ACTIONS = """
seen.links = [...document.querySelectorAll("a[href^='#']")].map(link => {
  link.click(); return document.getElementById(link.hash.slice(1)).open;
});
await new Promise(resolve => setTimeout(resolve, 100));  // a site is drawn when it is opened
const site = document.querySelector("details[id]"), [first, second] = site.querySelectorAll(".times i");
const table = site.querySelector("table"), names = [...table.tHead.rows[0].cells].map(each => each.textContent);
const shown = () => site.querySelector(".shown").innerText, marked = () => [...table.querySelectorAll(".marked")].map(row => row.rowIndex);
const column = name => [...table.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[names.indexOf(name)].textContent);
const click = name => table.tHead.rows[0].cells[names.indexOf(name)].click();
second.dispatchEvent(new MouseEvent("mouseenter")); seen.hovered = shown();
seen.before = marked(); second.click(); seen.clicked = marked();
seen.loaded = column("ms");
const copier = site.querySelector(".shown button");
document.execCommand = () => { seen.copied = document.querySelector("textarea").value; return true; };  // without a person it refuses
copier.click(); seen.copier = copier.textContent;
click("ms"); click("ms"); seen.down = column("ms");
click("#"); seen.index = column("#");
const filter = site.querySelector("input");
filter.value = "OutOf RANK"; filter.dispatchEvent(new Event("input")); seen.dropped = column("why");
seen.width = document.documentElement.scrollWidth; seen.window = innerWidth;
"""  # noqa: E501


HOSTILE = (
    "<img src=x"
    " onerror=\"document.title='forged'\"></script><script>document.title='forged'</script>\u202e"
)
LOOKS = """
await new Promise(resolve => setTimeout(resolve, 100));
seen.title = document.title; seen.text = document.body.innerText; seen.images = document.images.length;
"""  # noqa: E501


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``seen`` of a script that ran in each page after it was loaded; under "console" the lines of
    the browser's.
    """
    folder = tmp_path_factory.mktemp("pages")
    rows = [
        candidate(0, fields={HOSTILE: 1, "B": 1}),
        candidate(1, fields={HOSTILE: 2, "B": 1}, failure=HOSTILE, latency_ms=None),
    ]
    hostile = record(
        candidates=rows, winner=0, kernel=HOSTILE, key=HOSTILE, closure="step", reason=HOSTILE
    )
    pages = {
        "phone": (390, tunings_of(story_record(k, 60) for k in range(3)), ACTIONS),
        "hostile": (1200, tunings_of([hostile]), LOOKS),
    }
    for name, (_, tunings, script) in pages.items():
        (folder / f"{name}.html").write_text(render(tunings) + TOLD.format(name, script))
    path = folder / "frames.html"
    path.write_text(
        FRAMES.format("".join(FRAME.format(width, name) for name, (width, *_) in pages.items()))
    )
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    found = [
        json.loads(html.unescape(text))
        for text in re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    ]
    return {each["page"]: each for each in found} | {
        "console": re.findall(r":CONSOLE.*", done.stderr)
    }


def test_all_that_the_page_can_do_works_on_a_phone(shown: dict[str, Any]):
    """390 pixels wide, nothing on the console, and the page itself does not scroll sideways."""
    seen = shown["phone"]
    assert (shown["console"], seen["links"]) == ([], [True] * 3)
    for words in (
        "candidate ",
        "triton.Config({'BLOCK_M': ",
        "rank 0: ",
        "rank 3: ",
        "not chosen: kernel ",
    ):
        assert words in seen["hovered"]
    assert (seen["before"], seen["clicked"]) == ([1], [2])
    assert (seen["copier"], seen["copied"] in seen["hovered"]) == ("copied", True)
    times = [float(each) for each in seen["down"] if each]
    assert times == sorted(times, reverse=True)
    assert seen["loaded"] != seen["down"]
    assert seen["down"][len(times) :] == [""] * (60 - len(times)), "what has no time comes last"
    assert seen["index"] == [str(k) for k in range(60)]
    assert 0 < len(seen["dropped"]) < 60
    assert all("OutOfResources" in each for each in seen["dropped"])
    assert (seen["window"], seen["width"]) == (390, 390)


def test_names_of_unknown_origin_run_nothing(shown: dict[str, Any]):
    """Markup in kernels, keys, configs and failures is shown as text, and an invisible character by
    its number.
    """
    seen = shown["hostile"]
    assert (shown["console"], seen["title"], seen["images"]) == ([], "Tuning of step", 0)
    assert "<img src=x" in seen["text"]
    assert "\\u{202e}" in seen["text"]
