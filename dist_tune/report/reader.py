"""Event files, read once or followed: a file may be written meanwhile, cut off, damaged, or of another version.

Knows files and the format of events; what events mean together is the story's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from pydantic import ValidationError

from dist_tune.output import EVENT, EVENTS_VERSION, AnyEvent, RunBegun
from dist_tune.report.story import Story, numbers
from dist_tune.safe_files import opener

MAX_FILE_BYTES = 256 * 2**20
"""Of an event file; a tuning of 20 sites of 200 candidates writes about 2 MB on each rank."""
_NAME = re.compile(r"rank-(\d{1,7})\.jsonl")
_VERSION = re.compile(rb'\{"v":\s*(\d{1,9})\b')
_HEADER = re.compile(rb'^\{[^{}\n]{0,200}"kind"\s*:\s*"run"', re.MULTILINE)


class UnreadableEventsError(OSError):
    """Files that hold no events of this version. The message is one line: the file, the reason, and the remedy."""


class EventFile:
    """One rank's file. Each ``read`` goes on where the one before has ended. A line that cannot be read costs the rest of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.events: list[AnyEvent] = []
        """Of the last run of the job."""
        self.n_runs = 0
        self.damage = ""
        """The file, the line, what is wrong there and what is left out for it, in one line; empty for a file that is whole."""
        self.is_refused = False
        """True if what stands there will never be an event; a line that is cut off may be written on."""
        self._offset = self._n_lines = 0

    @property
    def header(self) -> AnyEvent | None:
        """The first event of the last run."""
        return self.events[0] if self.events else None

    def read(self) -> bool:
        """Take in the events that have been added; true if they belong to another run than those before."""
        run, self.is_refused = self.header, False
        try:
            wrong = self._take(self._added())
        except OSError as error:
            wrong, self.is_refused = f": {error.strerror or error}", True
        left_out = f"{'the rest of ' * bool(self.events)}rank {self.rank} is left out"
        self.damage = f"{self.path}{wrong}: {left_out}" if wrong else ""
        return self.header is not run

    def _added(self) -> bytes:
        with open(self.path, "rb", opener=opener()) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes > MAX_FILE_BYTES:  # a sparse file or years of runs: reading it would take minutes
                limit = f"{n_bytes / 2**20:.0f} MiB, and at most {MAX_FILE_BYTES >> 20} MiB are read"
                raise OSError(f"{limit}: move it away, and the next tuning begins a new one")
            if n_bytes < self._offset:  # begun anew by another job
                self._offset = self._n_lines = self.n_runs = 0
                self.events = []
            file.seek(self._offset)
            return file.read()

    def _take(self, content: bytes) -> str:
        """Take in the lines of the last run; returns what is wrong with the first that is no event."""
        whole = content[: content.rfind(b"\n") + 1]
        if headers := [match.start() for match in _HEADER.finditer(whole)]:
            self._skip(whole[: headers[-1]])
            self.events, self.n_runs = [], self.n_runs + len(headers)
        for line in BytesIO(whole[headers[-1] :] if headers else whole):
            where, version = f", line {self._n_lines + 1}", _VERSION.match(line)
            self.is_refused = True
            if version and int(version[1]) != EVENTS_VERSION:
                return f"{where}: written with events version {int(version[1])}, and this dist_tune reads version {EVENTS_VERSION}"
            try:
                self.events.append(EVENT.validate_json(line))
            except ValidationError:
                return f"{where}: no event"
            self.is_refused = False
            self._skip(line)
        if len(whole) < len(content):
            return f", line {self._n_lines + 1}: cut off"
        return "" if self.events else ": the file is empty"

    def _skip(self, content: bytes) -> None:
        self._offset += len(content)
        self._n_lines += content.count(b"\n")


class Watcher:
    """The story so far of a folder whose files are being written; ranks may join at any time."""

    def __init__(self, folder: Path, *, may_come: bool = False) -> None:
        """``may_come``: the folder may not be there yet, because the first tuning makes it."""
        self.story = Story()
        self.damage: dict[int, str] = {}
        """Rank -> a sentence about its damaged file and what is left out for it."""
        self._folder, self._may_come = folder, may_come
        self._files: dict[int, EventFile] = {}
        self._stale: list[int] = []
        """Ranks of an earlier job that had more of them than the header says that was written last."""

    def poll(self) -> bool:
        """Take in what has been added; true if there was something. A damaged file costs its own rank alone: see ``damage``.

        Raises:
            UnreadableEventsError: no file can be used.
            OSError: the folder cannot be read.
        """
        if self._may_come and not self._folder.exists():
            return False
        found = [(int(match[1]), self._folder / name) for name in os.listdir(self._folder) if (match := _NAME.fullmatch(name))]
        self._files |= {rank: EventFile(path, rank) for rank, path in sorted(found) if rank not in self._files}
        n_taken, before = {rank: len(file.events) for rank, file in self._files.items()}, self._stale
        n_anew = sum(file.read() for file in self._files.values())
        runs = [file.header for file in self._files.values() if isinstance(file.header, RunBegun)]
        newest = max(runs, key=lambda run: run.at, default=None)
        self._stale = [rank for rank in self._files if newest and rank >= newest.world_size]
        files = {rank: file for rank, file in self._files.items() if rank not in self._stale}
        self.damage = {rank: file.damage for rank, file in files.items() if file.damage}
        if n_anew or self._stale != before:
            self.story, n_taken = Story(), {}
        added = [event for rank, file in files.items() for event in file.events[n_taken.get(rank, 0) :]]
        for event in added:
            self.story.take(event)
        refused = [file.damage for file in self._files.values() if file.is_refused and not file.events]
        if refused and not self.story.tunings and len(refused) == len(self._files):
            raise UnreadableEventsError(refused[0] + ", and so are all others" * (len(refused) > 1))
        return bool(added)

    @property
    def is_over(self) -> bool:
        """True if there were tunings, and none is under way."""
        tunings = self.story.tunings.values()
        return bool(tunings) and not any(each.is_under_way for each in tunings)

    @property
    def notes(self) -> list[str]:
        """Sentences about what was passed over, apart from damage."""
        runs = [(each.path.name, each.n_runs - 1) for each in self._files.values() if each.n_runs > 1]
        told = [f"{name}: {n} earlier run{'s' * (n > 1)} of the job left out" for name, n in runs]
        stale = f"files of an earlier job with another number of ranks are left out: ranks {numbers(self._stale)}"
        return [*told, *[stale] * bool(self._stale), *self.story.notes]


def story_of_folder(folder: Path) -> Story:
    """What the event files of a folder tell.

    Raises:
        UnreadableEventsError: there are none, or none of them can be used.
        OSError: the folder cannot be read.
    """
    watcher = Watcher(folder)
    watcher.poll()
    story, damage = watcher.story, watcher.damage
    if not story.tunings and not watcher._files:
        raise UnreadableEventsError(f"there is no rank-<i>.jsonl in {folder}: name the folder of DIST_TUNE_LOG_DIR, or records")
    if not story.tunings:
        raise UnreadableEventsError(": ".join([f"the files in {folder} tell of no tuning yet", *list(damage.values())[:1]]))
    story.notes, story.damage = [*watcher.notes, *_gaps(story, set(damage))], list(damage.values())
    return story


def _gaps(story: Story, damaged: set[int]) -> Iterator[str]:
    """Sentences about what is missing, other than what ``damaged`` ranks would have told."""
    unreadable = {site.met.site: site.unreadable for _, site in story.sites if site.record is None and site.unreadable}
    yield from (f"site {number}: its record cannot be read ({reason})" for number, reason in unreadable.items())
    for tuning in story.tunings.values():
        n_ranks, ranks = tuning.world_size, tuning.ranks
        if absent := set(range(min(n_ranks, 100_000))) - set(ranks) - damaged:
            told = f"no events of {len(absent)} of {n_ranks} ranks ({numbers(absent)}), which may log to other folders"
            yield f"{tuning.title}: {told}"
        if n_open := sum(each.done is None for each in ranks.values()):
            yield f"{tuning.title}: the tuning had not ended on {n_open} of {len(ranks)} ranks"
        failed = [(rank, each.done.error) for rank, each in sorted(ranks.items()) if each.done and each.done.error]
        yield from (f"{tuning.title}: rank {rank} ended with {error[:300]}" for rank, error in failed)
