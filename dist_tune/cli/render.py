"""Answers of commands, and how they are written: texts and tables on stdout, problems on stderr.

Records come from anywhere, so their texts are shown as they are: never as markup, and with control characters escaped.
Imports nothing heavy, as ``main``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from dist_tune.safe_files import Rights

_PIPE = 10_000
"""Width of a pipe or a file in characters: one record, one line."""
_LAST_COLUMN = 24
"""Least width of a table's last column, in characters, unless its cells are shorter."""


Page = Sequence["str | Text | Table"]
"""Parts of what people see. A plain string is a line as it is: escaped where it cannot be printed, and never broken. A blank line follows
after a table; an empty table is nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command: values for programs, a page for people."""

    values: dict[str, Any]
    page: Page
    exit_code: int = 0
    problems: Sequence[str] = ()
    """Lines for stderr, with and without ``--json``."""


class LeftOutWarning(UserWarning):
    """Something damaged is left out of a command's answer. The message is one line: the file, the line, and what is wrong there."""


class RefusedError(Exception):
    """The command cannot do what was asked. The message says why, and what can be done."""


def failure(exit_code: int, reason: str) -> Answer:
    """The answer of a command that cannot do what was asked: one line on stderr, and as JSON an ``error``."""
    return Answer({"error": reason}, [], exit_code, [reason])


def complain(text: str) -> None:
    """Write one line to stderr."""
    typer.echo(f"{typer.style('dist-tune:', fg='red', bold=True)} {plain(text, 2000)}", err=True)


def rendered(page: Page) -> str:
    """A page as it stands on stdout. A table never loses digits: where a terminal is too narrow, the terminal breaks its lines."""
    from rich.console import Console
    from rich.table import Table

    # Texts of records are no markup. With a height, because rich gives a dumb terminal 80 columns without one.
    console = Console(highlight=False, markup=False, emoji=False, height=100)
    n_columns = console.width if sys.stdout.isatty() else _PIPE
    with console.capture() as shown:
        for part in page:
            if not isinstance(part, Table):
                console.print("\n".join(map(_printable, part.split("\n"))) if isinstance(part, str) else part, soft_wrap=True)
            elif part.columns:
                console.width = max(n_columns, sum((each.min_width or 0) + 2 for each in part.columns))
                console.print(part)
                console.print()
    return "".join(f"{line.rstrip()}\n" for line in shown.get().strip("\n").splitlines())  # tables fill their last column with blanks


def write_file(path: Path, content: bytes, rights: Rights | None = None) -> None:
    """Write a file whole or not at all, of a link the file that it leads to; without ``rights`` its permissions follow the umask.

    Raises:
        RefusedError: it cannot be written, or something else than a file is there: a folder, a fifo, a device.
    """
    from dist_tune.safe_files import write_whole

    if path.exists() and not path.is_file():
        raise RefusedError(f"{path} cannot be written: it is no regular file")
    try:
        write_whole(Path(os.path.realpath(path)), content, rights)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}") from error


def write_out(text: str) -> bool:
    """Write to stdout. False if its reader has gone, as ``| head``, which has seen enough.

    Raises:
        OSError: stdout cannot be written, as on a full disk.
    """
    try:
        # A terminal that knows ASCII alone gets "\\xb7" and not a traceback.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        discard()
        if isinstance(error, BrokenPipeError):
            return False
        raise
    return True


def discard() -> None:
    """Let all that is still to be written to stdout go nowhere, or Python complains of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(rows: Sequence[Mapping[str, object]], styles: Sequence[str] = (), *, has_header: bool = True) -> Table:
    """Rows, each heading -> cell, as a table. Numbers stand to the right; columns without a text are left out; only the last one wraps."""
    from rich.cells import cell_len
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim", show_header=has_header)
    columns = {heading: [_cell(row[heading]) for row in rows] for heading in (rows[0] if rows else ())}
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    for heading, cells in columns.items():
        justify: Literal["right", "left"] = "right" if all(re.match(r"$|[+-]?\d", each) for each in cells) else "left"
        is_last = heading == [*columns][-1]
        width = max(cell_len(line) for text in (heading, *cells) for line in text.split("\n"))
        least = min(width, _LAST_COLUMN) if is_last else width  # rich would cut what a narrow terminal has no room for
        colour = {"id": "cyan", "name": "dim"}.get(heading)
        shown.add_column(heading, justify=justify, no_wrap=not is_last, overflow="fold", style=colour, min_width=least)
    for texts, style in zip_longest(zip(*columns.values(), strict=True), styles):
        shown.add_row(*texts, style=style)
    return shown


def _cell(value: object) -> str:
    return milliseconds(value) if isinstance(value, float) else "" if value is None else plain(value, 400)


def facts(pairs: Mapping[str, object]) -> Table:
    """Names and values, one pair to a line; empty values are left out."""
    return table([{"name": name, "value": value} for name, value in pairs.items() if value], has_header=False)


def plain(text: object, limit: int = 160) -> str:
    """One printable line of at most ``limit`` characters; of a longer text the middle is left out. ``--json`` gives all of it."""
    safe = _printable(" ".join(str(text).split()))
    return safe if len(safe) <= limit else f"{safe[: limit - limit // 3 - 1]}\N{HORIZONTAL ELLIPSIS}{safe[-(limit // 3) :]}"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def ago(moment: datetime) -> str:
    """Time since ``moment`` in one unit: "3 min", "2 h", "5 d"; a date if it is in the future by this clock."""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    if seconds < -60:
        return f"{moment:%Y-%m-%d}"
    unit, length_s = next((each for each in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= each[1]), ("s", 1))
    return f"{max(0, int(seconds // length_s))} {unit}"


def size(n_bytes: int) -> str:
    """Bytes with a binary unit: "512 B", "1.5 KiB", "140.0 GiB"."""
    from pydantic import ByteSize

    return ByteSize(n_bytes).human_readable(separator=" ")


def milliseconds(value: float) -> str:
    """Four decimals as in the log, fewer for long times."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"
