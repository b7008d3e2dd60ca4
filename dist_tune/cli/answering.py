"""A command's answer on the streams: a page or one JSON document on stdout, problems and warnings on stderr, and the exit code.

Parts of a page that are plain strings are lines as they are: escaped where they cannot be printed, and never broken.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from dist_tune.cli.stdout import discard, write_out
from dist_tune.cli.tables import Answer, LeftOutWarning, RefusedError, least_width, plain
from dist_tune.output import printable
from dist_tune.settings import SettingsError

LEFT_OUT = 3
"""Exit code of a command that has done what was asked, without something that is damaged."""
_UNLIMITED = 10_000
"""Width of a pipe or a file in characters: one record, one line."""
_FILL = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")
"""Blanks at the end of a line, among codes for colours."""


def give(ask: Callable[[], Answer], *, as_json: bool, failed: int = 1) -> int:
    """Run a command and write its answer; returns the exit code, ``failed`` where it cannot do what was asked."""
    told: dict[str, type[Warning]] = {}

    def show(message: Warning | str, category: type[Warning], *_args: object, **_kwargs: object) -> None:
        if str(message) not in told:  # both sides of a comparison may be one folder
            complain(str(message))
        told[str(message)] = category

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        # The text alone: the line of the library that it comes from is of no use at a terminal.
        warnings.showwarning = show
        try:
            answer = ask()
        except (RefusedError, OSError) as error:
            answer = failure(failed, _reason(error))
        except SettingsError as error:
            answer = failure(2, str(error))
        except KeyboardInterrupt:
            return 130
    for problem in answer.problems:
        complain(problem)
    try:
        if as_json or answer.page:
            write_out(json.dumps(answer.values, indent=1) + "\n" if as_json else rendered(answer.page))
    except OSError as error:  # of stdout
        discard()
        complain(f"stdout: {error.strerror or error}")
        return failed
    return answer.exit_code or LEFT_OUT * any(issubclass(each, LeftOutWarning) for each in told.values())


def failure(exit_code: int, reason: str) -> Answer:
    """The answer of a command that cannot do what was asked: one line on stderr, and as JSON an ``error``."""
    return Answer({"error": reason}, [], exit_code, [reason])


def rendered(page: Sequence[RenderableType]) -> str:
    """A page as it stands on stdout."""
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False)  # texts of records are no markup
    columns = console.width
    with console.capture() as rendered:
        for each in page:
            if isinstance(each, str):
                console.print("\n".join(map(printable, each.split("\n"))), soft_wrap=True)
                continue
            console.width = max(columns, least_width(each)) if is_terminal else _UNLIMITED
            console.print(each)
    # Tables fill their last column with blanks, which lengthen the lines of a pipe, and which a narrow terminal breaks into empty lines.
    return "".join(f"{_FILL.sub(_codes, line)}\n" for line in rendered.get().splitlines())


def _reason(error: Exception) -> str:
    """The message of an error; of the system's the file and what is wrong with it."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename and error.strerror else str(error)


def _codes(fill: re.Match[str]) -> str:
    return fill[0].replace(" ", "")


def complain(text: str) -> None:
    """Write one line to stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("dist-tune: ", "bold red"), plain(text, 2000)))
