"""A headless browser for tests of the page, where one is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed: apt-get install chromium")
# A window is never narrower than 500 pixels; a frame may be as narrow as a phone.
FRAME = """<!doctype html><iframe width={width} height=800 style="border:0" src="page.html"></iframe><pre id="seen"></pre>
<script>addEventListener("message", event => {{ document.getElementById("seen").textContent = event.data; }});</script>"""


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
