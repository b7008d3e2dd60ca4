"""``dist-tune report``, ``watch``, ``diff`` and ``trace``: what tunings did, from event files and records.

Each function is a command of typer, and returns its exit code. Bad input is one line on stderr and exit code 1; of diff, where 1 means
slower, exit code 2. A damaged file among others is one line on stderr and exit code 3.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dist_tune.cli.commands import AsJson, answered
from dist_tune.cli.stdout import write_out

if TYPE_CHECKING:
    from dist_tune.cli.tables import Answer
    from dist_tune.report import Watcher

_SOURCES = "The folder of a tuning's logs (DIST_TUNE_LOG_DIR if left out), or records: files, exports, cache folders, ids."
_PLAIN_EVERY_S = 5.0
_POLL_S = 0.5
# readable=False: a path that may not be read is one line of this command's, and no error of usage.
_Folder = Annotated[
    Path | None, typer.Argument(metavar="DIR", readable=False, help="The folder of the logs; DIST_TUNE_LOG_DIR if left out.")
]


def report(
    sources: Annotated[list[str] | None, typer.Argument(metavar="DIR|RECORD", help=_SOURCES)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", readable=False, help="The page; report.html if left out.")] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Lines on stdout; the page only with -o.")] = False,
    as_json: AsJson = False,
) -> int:
    """A page about tunings.

    It has winners, all candidates, parameters, the time line of the ranks. Exit code 3 if the events of a rank are damaged: the page is
    made of the rest.
    """

    def ask() -> Answer:
        from dist_tune.cli.records.sources import story_of
        from dist_tune.cli.tables import Answer
        from dist_tune.output import amount
        from dist_tune.report import render, summary, text

        story = story_of(sources or [])
        path = output or (None if as_text else Path("report.html"))
        page = [text(story).rstrip("\n")] if as_text else []
        if path is not None:
            content = render(story).encode()
            _write(path, content)
            page.append(f"{path}: {amount(len(story.sites), 'site')}, {len(content) / 1024:.0f} KiB")
        values = {"page": str(path) if path else None, **summary(story)}
        return Answer(values, page, problems=[] if as_text or as_json else story.notes)  # the text has them

    return answered(ask, as_json)


def watch(
    folder: _Folder = None,
    once: Annotated[bool, typer.Option("--once", help="Print the present state and end.")] = False,
    late_s: Annotated[
        float, typer.Option("--late", metavar="SECONDS", min=0.0, help="Silence after which a rank or candidate is named.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON document on stdout.")] = False,
) -> int:
    """Follow a running tuning from another terminal.

    It ends when all tunings in the folder have finished. Where there are no events yet it waits for the first one. Ctrl-C ends it at any
    time. Exit code 3 if the events of a rank are damaged: the others are followed.
    """

    def ask() -> Answer:
        from dist_tune.cli.tables import Answer, RefusedError
        from dist_tune.report import Watcher, progress_lines

        if as_json and not once:
            raise RefusedError("--json tells the present state: say --once with it")
        chosen = folder if folder is not None else _log_dir()
        watcher = Watcher(chosen, may_come=folder is None)
        if not once:
            return Answer({}, _follow(watcher, chosen, late_s))
        watcher.poll()
        if not watcher.story.tunings:
            raise RefusedError(f"no tuning has written events in {chosen} yet")
        lines = progress_lines(watcher.story, time.time(), late_s)
        damage = list(watcher.damage.values())
        _tell(damage)
        return Answer({"lines": lines, "notes": damage + watcher.notes}, [*lines, *watcher.notes])

    return answered(ask, as_json)


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A record's file or id, an export, a cache folder or a log folder.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The same, of later.")],
    as_json: AsJson = False,
) -> int:
    """What changed between records.

    Exit code 1: a winner got slower by more than its noise. Exit code 2: records cannot be read, or have no kernel and key in common.
    Exit code 3: nothing is slower, and a damaged event file was left out. Noise: the spread_ms of both winners added (the median
    distance of a launch from the median), and at least 1 % of the time.
    """

    def ask() -> Answer:
        from dist_tune.cli.records.sources import records_of
        from dist_tune.cli.tables import Answer
        from dist_tune.output import amount
        from dist_tune.report import compare, comparison_lines

        first, second = records_of(before), records_of(after)
        found = compare(first, second)
        lines = comparison_lines(found)
        if found["pairs"]:
            return Answer(found, lines, 1 if found["n_slower"] else 0)
        counts = f"{before} has {amount(len(first), 'record')}, {after} has {amount(len(second), 'record')}"
        reason = f"nothing to compare: {counts}, with no kernel and key in common"
        return Answer({**found, "error": reason}, lines, 2, [reason])

    return answered(ask, as_json, failed=2)


def trace(
    folder: _Folder = None,
    output: Annotated[Path, typer.Option("--output", "-o", readable=False, help="The file.")] = Path("trace.json"),
    as_json: AsJson = False,
) -> int:
    """A trace of a tuning for ui.perfetto.dev or chrome://tracing.

    Exit code 3 if the events of a rank are damaged: the trace has the rest.
    """

    def ask() -> Answer:
        from dist_tune.cli.records.sources import story_of_logs
        from dist_tune.cli.tables import Answer
        from dist_tune.report import trace_events

        story = story_of_logs(folder if folder is not None else _log_dir())
        events = list(trace_events(story))
        _write(output, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode())
        values = {"path": str(output), "n_events": len(events), "notes": story.damage + story.notes}
        return Answer(values, [f"{output}: {len(events)} events; open it in ui.perfetto.dev"], problems=story.notes)

    return answered(ask, as_json)


def _log_dir() -> Path:
    from dist_tune.settings import Settings

    return Settings().log_dir


def _write(path: Path, content: bytes) -> None:
    from dist_tune.cli.tables import RefusedError
    from dist_tune.safe_files import write_whole

    target = Path(os.path.realpath(path))  # of a link the file that it leads to
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise RefusedError(f"{path} cannot be written: it is no regular file")
    try:
        write_whole(target, content)
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror or error}") from error


def _follow(watcher: Watcher, folder: Path, late_s: float) -> list[str]:
    """Show the state until all have finished, Ctrl-C, or its reader has gone: one part of a terminal's screen, else lines where it changed.

    Returns the last line, if there is something to tell.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from dist_tune.cli.answering import rendered

    watcher.poll()  # an error of the folder before anything is shown
    console = Console(highlight=False, markup=False, emoji=False)
    view = (
        Live(console=console, auto_refresh=False, vertical_overflow="ellipsis")
        if console.is_terminal and not console.is_dumb_terminal
        else None
    )
    every_s = _PLAIN_EVERY_S if view is None else _POLL_S
    is_new, quiet_s, told = True, _PLAIN_EVERY_S, ""
    damage: list[str] = []
    try:
        with view or nullcontext():
            while True:
                lines = _state(watcher, folder, late_s)
                if view is not None:
                    view.update(Text("\n".join(lines), overflow="fold"), refresh=True)
                elif is_new or _apart_from_durations(lines) != told:  # a rank that hangs writes nothing: its silence is the news
                    if not write_out(rendered(lines)):
                        return []
                    told = _apart_from_durations(lines)
                before, damage = damage, list(watcher.damage.values())
                _tell([each for each in damage if each in before])  # for two looks: what is being written is no damage
                if watcher.is_over and quiet_s >= _PLAIN_EVERY_S:  # no news: a job's next tuning begins at once, as a rule
                    break
                time.sleep(every_s)
                is_new = watcher.poll()
                quiet_s = 0.0 if is_new else quiet_s + every_s
    except KeyboardInterrupt:
        _tell(watcher.damage.values())
        return []
    _tell(watcher.damage.values())
    return [_ending(watcher, folder)]


def _tell(damage: Iterable[str]) -> None:
    """Tell of damaged files on stderr, of each once."""
    from dist_tune.cli.tables import LeftOutWarning

    for each in damage:
        warnings.warn(each, LeftOutWarning, stacklevel=2)


def _state(watcher: Watcher, folder: Path, late_s: float) -> list[str]:
    from dist_tune.report import progress_lines

    if not watcher.story.tunings:
        return [f"no tuning has written events in {folder.absolute()} yet: waiting for one, until Ctrl-C"]
    return progress_lines(watcher.story, time.time(), late_s)


def _apart_from_durations(lines: list[str]) -> str:
    return re.sub(r"\b\d+ (s|min|h|d)\b", "", "\n".join(lines))


def _ending(watcher: Watcher, folder: Path) -> str:
    from dist_tune.cli.tables import ago

    n_tunings = len(watcher.story.tunings)
    have = "the tuning has finished, " if n_tunings == 1 else f"all {n_tunings} tunings have finished, the last one "
    return f"{have}{ago(datetime.fromtimestamp(watcher.story.last_at, UTC))} ago: dist-tune report {shlex.quote(str(folder))} tells more"
