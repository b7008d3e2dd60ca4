"""Faults of ranks, machines and links, and the tables of docs/reliability.md that say what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_table(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace a table of the page, which stands between two marks of its name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    page.write_text(before + "\n".join([begin, "", *lines, "", end]) + rest.split(end)[1])
