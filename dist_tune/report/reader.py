"""Event files, read once or followed: a file may be written meanwhile, cut off, damaged, or of another version.

Knows files and the format of events; what events mean together is the story's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from pydantic import ValidationError

from dist_tune.output import EVENT, EVENTS_VERSION, AnyEvent
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
    """One rank's file. Each ``read`` goes on where the one before has ended; the first begins with the file's last run.

    A damaged line costs the rest of the file: ``damage`` tells of it.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.n_earlier_runs = 0
        """Runs of the job that stand before the last one and are not read."""
        self.refusal = ""
        """The reason why the last ``read`` ended before the file's end, unless that is a line that may be written on."""
        self.n_events = 0
        self._offset = self._n_lines = 0
        self._is_cut_off = False

    @property
    def damage(self) -> str:
        """The file, the line, what is wrong there and what is left out for it, in one line; empty for a file that is whole."""
        told = self.refusal or f", line {self._n_lines + 1}: cut off" * self._is_cut_off or ": the file is empty" * (not self.n_events)
        return f"{self.path}{told}: {'the rest of ' * bool(self.n_events)}rank {self.rank} is left out" if told else ""

    def read(self) -> Iterator[AnyEvent]:
        """The events that have been added; none after a place where the file cannot be read."""
        self.refusal, self._is_cut_off = "", False
        try:
            for line in self._added():
                if not line.strip():
                    event = None
                elif not (event := self._event(line)):
                    return
                self._offset += len(line)
                self._n_lines += 1
                if event is not None:
                    self.n_events += 1
                    yield event
        except OSError as error:
            self.refusal = f": {error.strerror or error}"

    def _added(self) -> BytesIO:
        """What stands behind the place where the reading has ended, from the header of the last run on."""
        with open(self.path, "rb", opener=opener()) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes > MAX_FILE_BYTES:  # a sparse file or years of runs: reading it would take minutes
                limit = f"{n_bytes / 2**20:.0f} MiB, and at most {MAX_FILE_BYTES >> 20} MiB are read"
                raise OSError(f"{limit}: move it away, and the next tuning begins a new one")
            if n_bytes < self._offset:  # begun anew by another job
                self._offset = self._n_lines = self.n_events = 0
            file.seek(self._offset)
            content = file.read()
        headers = [match.start() for match in _HEADER.finditer(content)]
        if len(headers) > 1 or (headers and self.n_events):
            self.n_earlier_runs += len(headers) - (not self.n_events)
            self._offset += headers[-1]
            self._n_lines += content.count(b"\n", 0, headers[-1])
            self.n_events = 0
            content = content[headers[-1] :]
        return BytesIO(content)

    def _event(self, line: bytes) -> AnyEvent | None:
        """None with a ``refusal``, or where the line is cut off and may be written on."""
        where, event = f", line {self._n_lines + 1}", None
        if (version := _VERSION.match(line)) and int(version[1]) != EVENTS_VERSION:
            self.refusal = f"{where}: written with events version {int(version[1])}, and this dist_tune reads version {EVENTS_VERSION}"
            return None
        with suppress(ValidationError):
            event = EVENT.validate_json(line)
        if event is None and line.endswith(b"\n"):
            self.refusal = f"{where}: no event"
        self._is_cut_off = event is None and not self.refusal
        return event


class Watcher:
    """The story so far of a folder whose files are being written; ranks may join at any time."""

    def __init__(self, folder: Path, *, may_come: bool = False) -> None:
        """``may_come``: the folder may not be there yet, because the first tuning makes it."""
        self.story = Story()
        self._folder, self._may_come = folder, may_come
        self._files: dict[int, EventFile] = {}
        """By rank."""

    def poll(self) -> bool:
        """Take in what has been added; true if there was something. A damaged file costs its own rank alone: see ``damage``.

        Raises:
            UnreadableEventsError: no file can be used.
            OSError: the folder cannot be read.
        """
        if self._may_come and not self._folder.exists():
            return False
        found = [(int(match[1]), self._folder / name) for name in os.listdir(self._folder) if (match := _NAME.fullmatch(name))]
        is_new = False
        for rank, path in sorted(found):
            for event in self._files.setdefault(rank, EventFile(path, rank)).read():
                self.story.take(event)
                is_new = True
        self.story.leave_out_stale_ranks()
        files = list(self._files.values())
        if files and not self.story.tunings and all(each.refusal and not each.n_events for each in files):
            raise UnreadableEventsError(files[0].damage + ", and so are all others" * (len(files) > 1))
        return is_new

    @property
    def is_over(self) -> bool:
        """True if there were tunings, and none is under way."""
        tunings = self.story.tunings.values()
        return bool(tunings) and not any(each.is_under_way for each in tunings)

    @property
    def notes(self) -> list[str]:
        """Sentences about what was passed over, apart from damage."""
        runs = [(each.path.name, each.n_earlier_runs) for each in self._files.values() if each.n_earlier_runs]
        return [f"{name}: {n} earlier run{'s' * (n > 1)} of the job left out" for name, n in runs] + self.story.notes

    @property
    def damage(self) -> dict[int, str]:
        """Rank -> a sentence about its damaged file and what is left out for it. Files of an earlier job with more ranks are none of it."""
        n_ranks = self.story.world_size
        return {rank: each.damage for rank, each in self._files.items() if (n_ranks is None or rank < n_ranks) and each.damage}


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
    unreadable = {site.met.site: site.unreadable for _, site in story.sites if site.unreadable}
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
