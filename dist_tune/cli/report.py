"""Files behind ``dist-tune report``, ``watch``, ``diff`` and ``trace``: stories and records that words stand for, and the running view."""

from __future__ import annotations

import os
import re
import shlex
import time
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dist_tune.cache import TuningRecord
from dist_tune.cli import records
from dist_tune.cli.render import Answer, LeftOutWarning, RefusedError, ago, rendered, write_out
from dist_tune.report import Story, Watcher, progress_lines, story_of_folder, story_of_records
from dist_tune.settings import Settings

_QUIET_S = 5.0


def story_of(sources: list[str]) -> Story:
    """The story of a log folder (of DIST_TUNE_LOG_DIR without sources), or of the records that several words stand for.

    Raises:
        RefusedError: one of them stands for nothing.
        UnreadableEventsError, OSError: its files cannot be read.
    """
    if not sources or (len(sources) == 1 and _has_events(sources[0])):
        return story_of_logs(Path(sources[0]) if sources else None)
    return story_of_records(record for each in sources for record in records_of(each))


def story_of_logs(folder: Path | None) -> Story:
    """The story of a log folder (DIST_TUNE_LOG_DIR if None), with a ``LeftOutWarning`` for each damaged file.

    Raises:
        RefusedError: there is no such folder.
        UnreadableEventsError, OSError: as ``story_of_folder``.
    """
    folder = folder if folder is not None else Settings().log_dir
    try:
        story = story_of_folder(folder)
    except FileNotFoundError:
        advice = "run this where the tuning ran, or name the folder of its logs (DIST_TUNE_LOG_DIR)"
        raise RefusedError(f"{folder}: no such file or folder: {advice}") from None
    _tell(story.damage)
    return story


def records_of(source: str) -> list[TuningRecord]:
    """The records that a word of the command line stands for, see ``records.records_of``; of a log folder those of the winners so far.

    Raises: as ``story_of``.
    """
    if not _has_events(source):
        return records.records_of(source)
    story = story_of_logs(Path(source))
    found = [site.record for _, site in story.sites if site.record is not None]
    if not found:
        reason = next((reason for _, site in story.sites if (reason := site.unreadable)), "no site has its winner yet")
        raise RefusedError(f"the tunings in {source} have no record that can be read: {reason}")
    for note in story.notes:
        warnings.warn(note, stacklevel=2)
    return found


def _has_events(source: str) -> bool:
    return os.path.isdir(source) and any(name.startswith("rank-") and name.endswith(".jsonl") for name in os.listdir(source))


def _tell(damage: Iterable[str]) -> None:
    """Tell of damaged files on stderr, of each once."""
    for each in damage:
        warnings.warn(each, LeftOutWarning, stacklevel=2)


def look(folder: Path | None, late_s: float) -> Answer:
    """The present state of the tunings in a log folder."""
    chosen = folder if folder is not None else Settings().log_dir
    watcher = Watcher(chosen, may_come=folder is None)
    watcher.poll()
    if not watcher.story.tunings:
        raise RefusedError(f"no tuning has written events in {chosen} yet")
    damage = list(watcher.damage.values())
    _tell(damage)
    lines = progress_lines(watcher.story, time.time(), late_s)
    return Answer({"lines": lines, "notes": damage + watcher.notes}, [*lines, *watcher.notes])


def follow(folder: Path | None, late_s: float) -> Answer:
    """Show the state until all have finished, Ctrl-C, or its reader has gone: one part of a terminal's screen, else lines where it changed.

    The answer is the last line, if there is something to tell.
    """
    chosen = folder if folder is not None else Settings().log_dir
    watcher = Watcher(chosen, may_come=folder is None)
    watcher.poll()  # an error of the folder before anything is shown
    console = Console(highlight=False, markup=False, emoji=False)
    is_redrawn = console.is_terminal and not console.is_dumb_terminal
    every_s = 0.5 if is_redrawn else _QUIET_S
    view = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") if is_redrawn else None
    quiet_s, told = _QUIET_S, ""
    damage: list[str] = []
    page: list[str] = []
    try:
        with view or nullcontext():
            while True:
                lines = [f"no tuning has written events in {chosen.absolute()} yet: waiting for one, until Ctrl-C"]
                if watcher.story.tunings:
                    lines = progress_lines(watcher.story, time.time(), late_s)
                without_durations = re.sub(r"\b\d+ (s|min|h|d)\b", "", "\n".join(lines))
                if view is not None:
                    view.update(Text("\n".join(lines), overflow="fold"), refresh=True)
                elif without_durations != told and not write_out(rendered(lines)):
                    return Answer({}, [])
                told = without_durations
                before, damage = damage, list(watcher.damage.values())
                _tell(each for each in damage if each in before)  # for two looks: what is being written is no damage
                if watcher.is_over and quiet_s >= _QUIET_S:  # no news: a job's next tuning begins at once, as a rule
                    break
                time.sleep(every_s)
                quiet_s = 0.0 if watcher.poll() else quiet_s + every_s
        n_tunings, last = len(watcher.story.tunings), ago(datetime.fromtimestamp(watcher.story.last_at, UTC))
        have = "the tuning has finished, " if n_tunings == 1 else f"all {n_tunings} tunings have finished, the last one "
        page = [f"{have}{last} ago: dist-tune report {shlex.quote(str(chosen))} tells more"]
    except KeyboardInterrupt:
        pass
    _tell(watcher.damage.values())
    return Answer({}, page)
