"""Answers of commands, and how they are written: texts and tables on stdout, problems on stderr.

Records come from anywhere, so control characters in their texts are escaped. Imports nothing heavy, as ``main``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command: values for programs, lines for people."""

    values: dict[str, Any]
    lines: Sequence[str] = ()
    exit_code: int = 0
    problems: Sequence[str] = ()
    """Lines for stderr, with and without ``--json``."""


class RefusedError(Exception):
    """The command cannot do what was asked. The message says why, and what can be done."""


def complain(text: str) -> None:
    """Write one line to stderr."""
    typer.echo(f"{typer.style('dist-tune:', fg='red', bold=True)} {plain(text, 2000)}", err=True)


def table(rows: Sequence[Mapping[str, object]], colours: Sequence[str | None] = (), *, has_header: bool = True) -> list[str]:
    """Rows, each heading -> cell, as aligned lines, and an empty line behind them. Numbers stand to the right, empty columns are left out.

    No line is broken: of a pipe each is a row, and a terminal folds those that are too long. Of no rows there are no lines.
    """
    columns = {heading: [_cell(row[heading]) for row in rows] for heading in (rows[0] if rows else ())}
    aligned = []
    for heading, cells in columns.items():
        if any(cells):
            align = str.rjust if all(re.fullmatch(r"|\d[\d.]*( \w{1,3})?", each) for each in cells) else str.ljust
            texts = [plain(heading, 40)] * has_header + cells
            aligned.append([align(text, max(map(len, texts))) for text in texts])
    lines = ["  ".join(texts).rstrip() for texts in zip(*aligned, strict=True)]
    styles = [*[None] * has_header, *(colours or [None] * len(rows))]
    coloured = [typer.style(line, fg=colour) if colour else line for line, colour in zip(lines, styles, strict=False)]
    return [*coloured, ""] if rows else []


def _cell(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else value
    return f"{text:.4f}" if isinstance(text, float) else "" if text is None else plain(text, 400)


def facts(pairs: Mapping[str, object]) -> list[str]:
    """Names and values, one pair to a line; empty values are left out."""
    return table([{"name": name, "value": value} for name, value in pairs.items() if value], has_header=False)


def plain(text: object, limit: int = 160) -> str:
    """One printable line of at most ``limit`` characters and an ellipsis. ``--json`` gives all of it."""
    from dist_tune.output import printable
    from dist_tune.report import shortened

    return shortened(printable(" ".join(str(text).split())), limit)


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, of a link the file that it leads to. RefusedError if it cannot be, or is no regular file."""
    from dist_tune.files import write_whole

    if path.exists() and not path.is_file():
        raise RefusedError(f"{path} cannot be written: it is no regular file")
    try:
        write_whole(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}") from error
