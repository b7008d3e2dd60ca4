"""Answers of commands, and how they are written: texts and tables on stdout, problems on stderr.

Records come from anywhere, so control characters in their texts are escaped. Imports nothing heavy,
as ``main``.
"""

from __future__ import annotations

import os
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
    from dist_tune.log import plain

    typer.echo(f"{typer.style('dist-tune:', fg='red', bold=True)} {plain(text, 2000)}", err=True)


def table(
    rows: Sequence[Mapping[str, object]],
    colours: Sequence[str | None] = (),
    *,
    has_header: bool = True,
) -> list[str]:
    """Rows, each heading -> cell, as aligned lines in these colours, and an empty line behind
    them.
    """
    from dist_tune.log import table as aligned

    lines = aligned(rows, has_header=has_header)
    styles = [*(colours or [None] * len(rows))]
    if has_header:
        styles.insert(0, None)
    coloured = [
        typer.style(line, fg=colour) if colour else line
        for line, colour in zip(lines, styles, strict=False)
    ]
    return [*coloured, ""] if rows else []


def facts(pairs: Mapping[str, object]) -> list[str]:
    """Names and values, one pair to a line; empty values are left out."""
    return table(
        [{"name": name, "value": value} for name, value in pairs.items() if value], has_header=False
    )


def write_file(path: Path, content: bytes, *, keeps_old: bool = False) -> Path | None:
    """Write a file whole or not at all, of a link the file that it leads to; the copy of the one
    that was there, if it ``keeps_old``.

    RefusedError if it cannot be written, or is no regular file.
    """
    from dist_tune.files import write_whole

    if path.exists() and not path.is_file():
        raise RefusedError(f"{path} cannot be written: it is no regular file")
    try:
        return write_whole(Path(os.path.realpath(path)), content, keeps_old=keeps_old)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}") from error
