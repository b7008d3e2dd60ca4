"""Faults of ranks, machines and links, and the tables of logs/faults-cpu/README.md that say what
comes of them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path


def write_table(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace a table of the page, which stands between two marks of its name, below the commit and
    the date.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--exclude=*",
    ]
    made = f"Commit {subprocess.check_output(command, text=True).strip()}, {date.today()}."
    page.write_text(before + "\n".join([begin, "", made, "", *lines, "", end]) + rest.split(end)[1])
