"""The lines of a rank's log, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

_HEADER = re.compile(r"\d\d:\d\d:\d\d\.\d{3} INFO    (run of |dist_tune \S*, python |command: |DIST_TUNE_PROGRESS )")


def lines_of(path: Path) -> list[str]:
    """One for each event, without the headers of runs."""
    return [line for line in path.read_text().splitlines() if not _HEADER.match(line)]
