"""Event files, read once or followed: a file may be written meanwhile, cut off, damaged, or of another version.

Knows files and the format of events; what events mean together is the story's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from dist_tune.files import read_regular
from dist_tune.output import EVENT, EVENTS_VERSION, AnyEvent, RunBegun
from dist_tune.report.story import Story, numbers

MAX_FILE_BYTES = 256 * 2**20
"""Of an event file; a tuning of 20 sites of 200 candidates writes about 2 MB on each rank."""
_NAME = re.compile(r"rank-(\d{1,7})\.jsonl")
_HEADER = re.compile(rb'^\{[^{}\n]{0,200}"kind"\s*:\s*"run"', re.MULTILINE)
_NO_EVENT = f"no event of version {EVENTS_VERSION}, which this dist_tune reads"


class UnreadableEventsError(OSError):
    """There are no events of a tuning. The message is one line: the folder, the reason, and the remedy."""


class EventFile:
    """One rank's file. A line of its last run that cannot be read costs the rest of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.events: list[AnyEvent] = []
        """Of the last run of the job."""
        self.n_runs = 0
        self.damage = ""
        """The file, the line, what is wrong there and what is left out for it, in one line; empty for a file that is whole."""
        self._begin = self._end = 0
        """Of the last run, and of what has been taken in of it."""

    def read(self) -> bool:
        """Take in the events that have been added; true if there are any."""
        before = self._begin, self._end
        try:
            wrong = self._take(read_regular(self.path, MAX_FILE_BYTES))
        except OSError as error:
            wrong = f": {error.strerror or error}{self._left_out()}"
        self.damage = f"{self.path}{wrong}" if wrong else ""
        return before != (self._begin, self._end)

    def _take(self, content: bytes) -> str:
        """Take in the lines of the last run that are new; returns what is wrong with the first that is no event."""
        whole = content[: content.rfind(b"\n") + 1]
        headers = [match.start() for match in _HEADER.finditer(whole)] or [0]
        self.n_runs = len(headers)
        if headers[-1] != self._begin or len(content) < self._end:
            self.events, self._begin, self._end = [], headers[-1], headers[-1]
        with suppress(ValidationError):
            for line in whole[self._end :].splitlines(keepends=True):
                self.events.append(EVENT.validate_json(line))
                self._end += len(line)
        if self._end < len(content):
            wrong = _NO_EVENT if self._end < len(whole) else "cut off"
            return f", line {len(whole[: self._end].splitlines()) + 1}: {wrong}{self._left_out()}"
        # Damage before the last run costs nothing, because a job that was killed leaves some.
        return "" if content else f": the file is empty{self._left_out()}"

    def _left_out(self) -> str:
        return f": {'the rest of ' * bool(self.events)}rank {self.rank} is left out"


class Watcher:
    """The story so far of a folder whose files are being written; ranks, and the folder, may come at any time."""

    def __init__(self, folder: Path) -> None:
        self.story = Story()
        self._folder = folder
        self._files: dict[int, EventFile] = {}

    def poll(self) -> bool:
        """Take in what has been added; true if there was something. A damaged file costs its own rank alone.

        Raises:
            OSError: the folder cannot be read.
        """
        names = os.listdir(self._folder) if self._folder.exists() else []
        found = sorted((int(match[1]), self._folder / match[0]) for name in names if (match := _NAME.fullmatch(name)))
        self._files |= {rank: EventFile(path, rank) for rank, path in found if rank not in self._files}
        has_news = [file.read() for file in self._files.values()]
        headers = [event for file in self._files.values() for event in file.events[:1] if isinstance(event, RunBegun)]
        newest = max(headers, key=lambda run: run.at, default=None)
        files = {rank: file for rank, file in sorted(self._files.items()) if newest is None or rank < newest.world_size}
        if any(has_news):
            self.story = Story()
            for event in (event for file in files.values() for event in file.events):
                self.story.take(event)
            earlier = {file.path.name: file.n_runs - 1 for file in files.values() if file.n_runs > 1}
            self.story.notes += [f"{name}: {n} earlier run{'s' * (n > 1)} of the job left out" for name, n in earlier.items()]
            if stale := self._files.keys() - files.keys():
                told = f"files of an earlier job with another number of ranks are left out: ranks {numbers(stale)}"
                self.story.notes.append(told)
        self.story.damage = {rank: file.damage for rank, file in files.items() if file.damage}
        return any(has_news)


def story_of_folder(folder: Path) -> Story:
    """What the event files of a folder tell.

    Raises:
        UnreadableEventsError: no tuning.
        OSError: the folder cannot be read.
    """
    watcher = Watcher(folder)
    watcher.poll()
    story = watcher.story
    if not story.tunings:
        told = f"no rank-<i>.jsonl in {folder} tells of a tuning: name the folder of DIST_TUNE_LOG_DIR, or records"
        raise UnreadableEventsError("; ".join([told, *list(story.damage.values())[:1]]))
    story.notes += _gaps(story)
    return story


def _gaps(story: Story) -> Iterator[str]:
    """Sentences about what is missing, other than what damaged files would have told."""
    unreadable = {site.met.site: site.unreadable for _, _, site in story.sites if site.record is None and site.unreadable}
    yield from (f"site {number}: its record cannot be read ({reason})" for number, reason in unreadable.items())
    for tuning in story.tunings.values():
        n_ranks, ranks = tuning.world_size, tuning.ranks
        if absent := set(range(min(n_ranks, 100_000))) - ranks.keys() - story.damage.keys():
            yield f"{tuning.title}: no events of {len(absent)} of {n_ranks} ranks ({numbers(absent)}), which may log to other folders"
        if n_open := sum(each.done is None for each in ranks.values()):
            yield f"{tuning.title}: the tuning had not ended on {n_open} of {len(ranks)} ranks"
        yield from [each.done.error for _, each in sorted(ranks.items()) if each.done and each.done.is_cut_off][:1]
        failed = [
            (rank, each.done.error) for rank, each in sorted(ranks.items()) if each.done and each.done.error and not each.done.is_cut_off
        ]
        yield from (f"{tuning.title}: rank {rank} ended with {error[:300]}" for rank, error in failed)
