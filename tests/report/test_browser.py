"""The page in a real browser, headless, where one is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dist_tune.report import render, story_of_folder, story_of_records
from tests.cached_records import candidate, record
from tests.report.stories import write_story

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed: apt-get install chromium"),
]
# A window is never narrower than 500 pixels; a frame may be as narrow as a phone.
FRAME = """<!doctype html><iframe width={width} height=800 style="border:0" src="page.html"></iframe><pre id="seen"></pre>
<script>addEventListener("message", event => {{ document.getElementById("seen").textContent = event.data; }});</script>"""


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
"""


def opened(page: str, folder: Path, script: str, width: int = 1200) -> tuple[dict[str, Any], list[str]]:
    """``seen`` of a script that ran in the page after it was loaded, and the lines of the browser's console."""
    told = f"<script>(async () => {{ const seen = {{}}; {script}; parent.postMessage(JSON.stringify(seen), '*'); }})();</script>"
    (folder / "page.html").write_text(page + told)
    (folder / "frame.html").write_text(FRAME.format(width=width))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000", "--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(html.unescape(found[1]) or "{}") if found else {}, re.findall(r":CONSOLE.*", done.stderr)


def test_all_that_the_page_can_do_works_on_a_phone(tmp_path: Path):
    """390 pixels wide, nothing on the console, and the page itself does not scroll sideways."""
    write_story(tmp_path / "logs", 3, 60)
    seen, console = opened(render(story_of_folder(tmp_path / "logs")), tmp_path, ACTIONS, width=390)
    assert console == []
    assert seen["links"] == [True] * 3
    for words in ("candidate ", "triton.Config({'BLOCK_M': ", "rank 0: ", "rank 3: ", "not chosen: +"):
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


def test_names_of_unknown_origin_run_nothing(tmp_path: Path):
    """Markup in kernels, keys, configs and failures is shown as text, and an invisible character by its number."""
    hostile = "<img src=x onerror=\"document.title='forged'\"></script><script>document.title='forged'</script>\u202e"
    rows = [candidate(0, fields={hostile: 1, "B": 1}), candidate(1, fields={hostile: 2, "B": 1}, failure=hostile, latency_ms=None)]
    page = render(story_of_records([record(candidates=rows, winner=0, kernel=hostile, key=hostile, closure="step", reason=hostile)]))
    script = "await new Promise(resolve => setTimeout(resolve, 100)); seen.title = document.title; seen.text = document.body.innerText;"
    seen, console = opened(page, tmp_path, script + "seen.images = document.images.length;")
    assert (console, seen["title"], seen["images"]) == ([], "Tuning of step", 0)
    assert "<img src=x" in seen["text"]
    assert "\\u{202e}" in seen["text"]
