"""Texts and tables for a terminal, and the answer of a command that they are put into.

Pure: values in, renderables out. Records come from anywhere, so their texts are shown as they are: never as markup, and with control
characters escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_MAX_CHARS = 160
"""Length of a text in a table; ``--json`` gives all of it."""
_LAST_COLUMN = 24
"""Least width of a table's last column, in characters, unless its cells are shorter."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command: values for programs, a page for people."""

    values: dict[str, Any]
    page: Sequence[RenderableType]
    exit_code: int = 0
    problems: Sequence[str] = ()
    """Lines for stderr, with and without ``--json``."""


class LeftOutWarning(UserWarning):
    """Something damaged is left out of a command's answer. The message is one line: the file, the line, and what is wrong there."""


class RefusedError(Exception):
    """The command cannot do what was asked. The message says why, and what can be done."""


def plain(text: object, limit: int = _MAX_CHARS) -> str:
    """One printable line of at most ``limit`` characters; of a longer text the middle is left out."""
    flat = " ".join(str(text).split())
    safe = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in flat)
    return safe if len(safe) <= limit else f"{safe[: limit - limit // 3 - 1]}\N{HORIZONTAL ELLIPSIS}{safe[-(limit // 3) :]}"


def ago(moment: datetime) -> str:
    """Time since ``moment`` in one unit: "3 min", "2 h", "5 d"; a date if it is in the future by this clock."""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    if seconds < -60:
        return f"{moment:%Y-%m-%d}"
    unit, length_s = next((each for each in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= each[1]), ("s", 1))
    return f"{max(0, int(seconds // length_s))} {unit}"


def size(n_bytes: float) -> str:
    """Bytes with a binary unit: "512 B", "1.5 KiB", "96 KiB", "140 GiB"."""
    units = ["GiB", "MiB", "KiB", "B"]
    while n_bytes >= 1023.5 and len(units) > 1:
        n_bytes /= 1024
        units.pop()
    number = f"{n_bytes:.0f}" if n_bytes >= 10 else f"{n_bytes:.1f}".removesuffix(".0")
    return f"{number} {units[-1]}"


def milliseconds(value: float | None) -> str:
    """Four decimals as in the log, fewer for long times; empty for None."""
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def grid(*headings: str, right: Collection[str] = ()) -> Table:
    """An empty table, without a heading line if all headings are empty. ``right``: columns of numbers. Only the last column wraps."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim", show_header=any(headings))
    n_lines = max(heading.count("\n") for heading in headings)
    for number, heading in enumerate(headings, 1):
        lowered = "\n" * (n_lines - heading.count("\n")) + heading  # rich aligns headings at the bottom only together with their cells
        table.add_column(lowered, justify="right" if heading in right else "left", no_wrap=number < len(headings), overflow="fold")
    return table


def least_width(part: RenderableType) -> int:
    """Width in characters below which a table would lose digits, where a terminal breaks its lines instead; 0 for what is no table."""
    if not isinstance(part, Table):
        return 0
    # Table.__rich_measure__ takes the longest word of the last column, and that is a path at times.
    cells = [[line for cell in (column.header, *column.cells) for line in str(cell).split("\n")] for column in part.columns]
    *widths, last = (max(map(cell_len, lines)) + 2 for lines in cells)
    return sum(widths) + min(last, _LAST_COLUMN)


def facts(pairs: Mapping[str, str]) -> Table:
    """Names and values, one pair to a line, indented; empty values are left out."""
    table = grid("", "")
    for name, value in pairs.items():
        if value:
            table.add_row(Text(f"  {name}", style="dim"), value)
    return table
