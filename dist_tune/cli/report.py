"""Files behind ``dist-tune report``, ``watch``, ``diff`` and ``trace``: stories and records that words stand for, and the running view."""

from __future__ import annotations

import os
import re
import shlex
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dist_tune.cache import BrokenRecordError, TuningRecord
from dist_tune.cli.records import choose, opened, records_in
from dist_tune.cli.render import Answer, RefusedError
from dist_tune.output import plain
from dist_tune.report import Story, Watcher, progress_lines, story_of_folder, story_of_records
from dist_tune.settings import Settings

LEFT_OUT = 3
"""Exit code of a command that is done, without something of a rank whose event file is damaged."""
_QUIET_S = 5.0


def story_of(sources: list[str]) -> Story:
    """The story of a log folder (of DIST_TUNE_LOG_DIR without sources), or of the records that several words stand for.

    Raises RefusedError, or an OSError as UnreadableEventsError, if one of them stands for nothing.
    """
    if not sources or (len(sources) == 1 and _has_events(sources[0])):
        return story_of_folder(Path(sources[0]) if sources else Settings().log_dir)
    return story_of_records(record for each in sources for record in records_of(each)[0])


def records_of(source: str) -> tuple[list[TuningRecord], list[str]]:
    """The records that a word of the command line stands for, and what is damaged: a file, an export, a folder, an id, a kernel.

    At least one record, else as ``story_of``; of a log folder those of the winners so far.
    """
    path = Path(source)
    if _has_events(source):
        story = story_of_folder(path)
        found = [site.record for _, _, site in story.sites if site.record is not None]
        if not found:
            raise RefusedError("; ".join([f"the tunings in {source} have no record that can be read", *story.notes[-1:]]))
        return found, list(story.damage.values())
    if not path.exists():
        if "/" in source or path.suffix == ".json":
            raise RefusedError(f"{source}: no such file or folder")
        return [each.record for each in choose(opened(), source).values()], []
    read = list(records_in(path))
    broken = [f"{where} cannot be read: {each}" for where, each in read if isinstance(each, BrokenRecordError)]
    found = [each for _, each in read if isinstance(each, TuningRecord)]
    if not found or (broken and not path.is_dir()):
        raise RefusedError((broken or [f"there are no events in {source}, and no records that can be read"])[0])
    for each in broken:  # another file of a folder is nothing to fail of
        warnings.warn(each, stacklevel=2)
    return found, []


def _has_events(source: str) -> bool:
    return os.path.isdir(source) and any(name.startswith("rank-") and name.endswith(".jsonl") for name in os.listdir(source))


def look(folder: Path | None, late_s: float) -> Answer:
    """The present state of the tunings in a log folder."""
    chosen = folder or Settings().log_dir
    watcher = Watcher(chosen)
    watcher.poll()
    story, damage = watcher.story, list(watcher.story.damage.values())
    if not story.tunings:
        raise RefusedError("; ".join([f"no tuning has written events in {chosen} yet", *damage[:1]]))
    lines = progress_lines(story, time.time(), late_s)
    return Answer({"lines": lines, "notes": damage + story.notes}, [*lines, *story.notes], LEFT_OUT * bool(damage), damage)


def follow(folder: Path | None, late_s: float) -> Answer:
    """Show the state until all have finished, or Ctrl-C: one part of a terminal's screen, else lines where it changed."""
    chosen = folder or Settings().log_dir
    watcher = Watcher(chosen)
    watcher.poll()  # an error of the folder before anything is shown
    console = Console(highlight=False, markup=False, emoji=False)
    is_redrawn = console.is_terminal and not console.is_dumb_terminal
    view = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") if is_redrawn else None
    every_s, quiet_s, told, lines = 0.5 if is_redrawn else _QUIET_S, _QUIET_S, "", list[str]()
    try:
        with view or nullcontext():
            while True:
                lines = progress_lines(watcher.story, time.time(), late_s)
                lines = lines or [f"no tuning has written events in {chosen.absolute()} yet: waiting for one, until Ctrl-C"]
                lines = [*lines, *watcher.story.damage.values()]
                without_durations = re.sub(r"\b\d+ (s|min|h|d)\b", "", "\n".join(lines))
                if view is not None:
                    view.update(Text("\n".join(lines), overflow="fold"), refresh=True)
                elif without_durations != told:
                    typer.echo("\n".join(lines))
                told = without_durations
                tunings = watcher.story.tunings.values()
                if tunings and not any(each.is_under_way for each in tunings) and quiet_s >= _QUIET_S:
                    break  # no news: a job's next tuning begins at once, as a rule
                time.sleep(every_s)
                quiet_s = 0.0 if watcher.poll() else quiet_s + every_s
        lines = [f"all tunings have finished: dist-tune report {shlex.quote(str(chosen))} tells more"]
    except KeyboardInterrupt:
        lines = []
    damage = list(watcher.story.damage.values())
    return Answer({}, [plain(each) for each in lines], LEFT_OUT * bool(damage), damage)
