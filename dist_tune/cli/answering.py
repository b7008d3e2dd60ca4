"""A command's answer on the streams: a page or one JSON document on stdout, problems and warnings on stderr, and the exit code."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from dist_tune.cli.stdout import write_out
from dist_tune.cli.tables import Answer, RefusedError, least_width, plain
from dist_tune.settings import SettingsError

_UNLIMITED = 10_000
"""Width of a pipe or a file in characters: one record, one line."""
_FILL = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")
"""Blanks at the end of a line, among codes for colours."""


def give(ask: Callable[[], Answer], *, as_json: bool) -> int:
    """Run a command and write its answer; returns the exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        # The text alone: the line of the library that it comes from is of no use at a terminal.
        warnings.showwarning = lambda message, *_args, **_kwargs: complain(str(message))
        try:
            answer = ask()
        except (RefusedError, OSError) as error:
            answer = failure(1, str(error))
        except SettingsError as error:
            answer = failure(2, str(error))
        except KeyboardInterrupt:
            return 130
    for problem in answer.problems:
        complain(problem)
    write_out(json.dumps(answer.values, indent=1) + "\n" if as_json else _rendered(answer.page))
    return answer.exit_code


def failure(exit_code: int, reason: str) -> Answer:
    """The answer of a command that cannot do what was asked: one line on stderr, and as JSON an ``error``."""
    return Answer({"error": reason}, [], exit_code, [reason])


def _rendered(page: Sequence[RenderableType]) -> str:
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False)  # texts of records are no markup
    columns = console.width
    with console.capture() as rendered:
        for each in page:
            console.width = max(columns, least_width(each)) if is_terminal else _UNLIMITED
            console.print(each)
    # Tables fill their last column with blanks, which lengthen the lines of a pipe, and which a narrow terminal breaks into empty lines.
    return "".join(f"{_FILL.sub(_codes, line)}\n" for line in rendered.get().splitlines())


def _codes(fill: re.Match[str]) -> str:
    return fill[0].replace(" ", "")


def complain(text: str) -> None:
    """Write one line to stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("dist-tune: ", "bold red"), plain(text, 2000)))
