"""Event files: one may be written meanwhile, cut off, damaged, or of another version.

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
from dist_tune.log import EVENT, EVENTS_VERSION, AnyEvent, RunBegun
from dist_tune.report.tunings import Story, numbers

MAX_FILE_BYTES = 256 * 2**20
"""Of an event file; a tuning of 20 sites of 200 candidates writes about 2 MB on each rank."""
_NAME = re.compile(r"rank-(\d{1,7})\.jsonl")
_ONLINE = " online, "
"""In the name of such a tuning."""
_HEADER = re.compile(rb'^\{[^{}\n]{0,200}"kind"\s*:\s*"run"', re.MULTILINE)
_NO_EVENT = f"no event of version {EVENTS_VERSION}, which this dist_tune reads"


class UnreadableEventsError(OSError):
    """There are no events of a tuning.

    The message is one line: the folder, the reason, and the remedy.
    """


class EventFile:
    """One rank's file. A line of its last run that cannot be read costs the rest of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.events: list[AnyEvent] = []
        """Of the last run of the job."""
        self.n_runs = 0
        try:
            wrong = self._take(read_regular(path, MAX_FILE_BYTES))
        except OSError as error:
            wrong = f": {error.strerror or error}"
        left_out = f"{'the rest of ' if self.events else ''}rank {rank} is left out"
        self.damage = f"{path}{wrong}: {left_out}" if wrong else ""
        """The file, the line, what is wrong there and what is left out; empty if it is whole."""

    def _take(self, content: bytes) -> str:
        """Take in the last run; returns what is wrong with its first line that is no event."""
        whole = content[: content.rfind(b"\n") + 1]
        headers = [match.start() for match in _HEADER.finditer(whole)] or [0]
        self.n_runs, end = len(headers), headers[-1]
        with suppress(ValidationError):
            for line in whole[end:].splitlines(keepends=True):
                self.events.append(EVENT.validate_json(line))
                end += len(line)
        if end < len(content):
            wrong = _NO_EVENT if end < len(whole) else "cut off"
            return f", line {len(whole[:end].splitlines()) + 1}: {wrong}"
        # Damage before the last run costs nothing, because a job that was killed leaves some.
        return "" if content else ": the file is empty"


def story_of_folder(folder: Path) -> Story:
    """What the event files of a folder tell. A damaged file costs its own rank alone.

    Raises:
        UnreadableEventsError: no tuning.
        OSError: the folder cannot be read.
    """
    names = os.listdir(folder) if folder.exists() else []
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    found = sorted((int(match[1]), folder / match[0]) for match in matches)
    files = {rank: EventFile(path, rank) for rank, path in found}
    firsts = [event for file in files.values() for event in file.events[:1]]
    headers = [event for event in firsts if isinstance(event, RunBegun)]
    newest = max(headers, key=lambda run: run.at, default=None)
    stale = [rank for rank in files if newest is not None and rank >= newest.world_size]
    for rank in stale:
        del files[rank]
    story = Story(damage={rank: file.damage for rank, file in files.items() if file.damage})
    for event in (event for file in files.values() for event in file.events):
        story.take(event)
    # A call that may not be repeated hands its kernels on to the tuning beside the next ones.
    online = {each.closure for name, each in story.tunings.items() if _ONLINE in name}
    for name, each in list(story.tunings.items()):
        if each.closure in online and _ONLINE not in name and each.teller.done is None:
            del story.tunings[name]
    earlier = {file.path.name: file.n_runs - 1 for file in files.values() if file.n_runs > 1}
    for name, n in earlier.items():
        story.notes.append(f"{name}: {n} earlier run{'s' * (n > 1)} of the job left out")
    if stale:
        told = "files of an earlier job with another number of ranks are left out"
        story.notes.append(f"{told}: ranks {numbers(stale)}")
    if not story.tunings:
        told = (
            f"no rank-<i>.jsonl in {folder} tells of a tuning: name the folder of"
            " DIST_TUNE_LOG_DIR, or records"
        )
        raise UnreadableEventsError("; ".join([told, *list(story.damage.values())[:1]]))
    story.notes += _gaps(story)
    return story


def _gaps(story: Story) -> Iterator[str]:
    """Sentences about what is missing, other than what damaged files would have told."""
    unreadable = {
        site.met.site: site.unreadable
        for _, _, site in story.sites
        if site.record is None and site.unreadable
    }
    yield from (
        f"site {number}: its record cannot be read ({reason})"
        for number, reason in unreadable.items()
    )
    for tuning in story.tunings.values():
        n_ranks, ranks = tuning.world_size, tuning.ranks
        if absent := set(range(min(n_ranks, 100_000))) - ranks.keys() - story.damage.keys():
            yield (
                f"{tuning.title}: no events of {len(absent)} of {n_ranks} ranks"
                f" ({numbers(absent)}), which may log to other folders"
            )
        if n_open := sum(each.done is None for each in ranks.values()):
            yield f"{tuning.title}: the tuning had not ended on {n_open} of {len(ranks)} ranks"
        yield from [
            each.done.error
            for _, each in sorted(ranks.items())
            if each.done and each.done.is_cut_off
        ][:1]
        failed = [
            (rank, each.done.error)
            for rank, each in sorted(ranks.items())
            if each.done and each.done.error and not each.done.is_cut_off
        ]
        yield from (
            f"{tuning.title}: rank {rank} ended with {error[:300]}" for rank, error in failed
        )
