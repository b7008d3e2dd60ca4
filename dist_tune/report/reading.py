"""Event files line by line, with limits: a file may be written meanwhile, cut off, damaged, or of another version.

Knows files and ``dist_tune.output.events``; nothing of what events mean together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from dist_tune.output import EVENT, EVENTS_VERSION, AnyEvent
from dist_tune.safe_files import opener

MAX_LINE_BYTES = 8 * 2**20
MAX_FILE_BYTES = 256 * 2**20
"""Of an event file; a tuning of 20 sites of 200 candidates writes about 2 MB on each rank."""
_NAME = re.compile(r"rank-(\d{1,7})\.jsonl")
_HEADER = re.compile(rb'"kind"\s*:\s*"run"')


class UnreadableEventsError(OSError):
    """A file that holds no events of this version. The message is one line: the file, the reason, and the remedy."""


def event_files(folder: Path) -> list[Path]:
    """The ``rank-<i>.jsonl`` of a folder by rank.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    found = [(int(match[1]), folder / name) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return [path for _, path in sorted(found)]


class EventFile:
    """One rank's file. Each ``read`` goes on where the one before has ended; the first begins with the file's last run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_earlier_runs = 0
        """Runs of the job that stand before the last one and are not read."""
        self._offset = -1
        self._n_lines = 0
        self._n_events = 0
        self._n_bad = 0
        self._first_bad = 0
        self._is_cut_off = False

    @property
    def notes(self) -> list[str]:
        """Sentences about what was passed over."""
        notes = []
        if self.n_earlier_runs:
            notes.append(f"{self.path.name}: {self.n_earlier_runs} earlier run{'s' * (self.n_earlier_runs > 1)} of the job left out")
        if self._n_bad:
            are = "line is no event and is" if self._n_bad == 1 else "lines are no events and are"
            notes.append(f"{self.path.name}: {self._n_bad} {are} passed over, the first is line {self._first_bad}")
        if self._is_cut_off:
            notes.append(f"{self.path.name}: the last line is cut off and is passed over")
        return notes

    def read(self) -> Iterator[AnyEvent]:
        """The events that have been added.

        Raises:
            UnreadableEventsError: the file or a line of it is too large, or it is of another version, or holds no event at all.
            OSError: it cannot be read.
        """
        with open(self.path, "rb", opener=opener()) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes > MAX_FILE_BYTES:
                # A sparse file or years of runs: reading it would take minutes.
                limit = f"{n_bytes / 2**20:.0f} MiB, and at most {MAX_FILE_BYTES >> 20} MiB are read"
                raise UnreadableEventsError(f"{self.path} has {limit}: move it away, and the next tuning begins a new one")
            if self._offset < 0 or n_bytes < self._offset:  # begun anew by another job
                self._offset = self._n_lines = 0
                self._find_last_run(file)
            file.seek(self._offset)
            for line in self._lines(file):
                self._n_lines += 1
                event = self._event(line)
                self._is_cut_off = event is None and not line.endswith(b"\n")
                if self._is_cut_off:  # it may be written on
                    self._n_lines -= 1
                    break
                self._offset += len(line)
                if event is not None:
                    self._n_events += 1
                    yield event
                elif line.strip():
                    self._n_bad += 1
                    self._first_bad = self._first_bad or self._n_lines
        if self._n_bad and not self._n_events:
            raise UnreadableEventsError(f"{self.path} holds no events of a tuning: line {self._first_bad} is none")

    def _find_last_run(self, file: BinaryIO) -> None:
        offset = n_runs = 0
        for n_lines, line in enumerate(self._lines(file)):
            if _HEADER.search(line, 0, 4096):
                n_runs += 1
                self._offset, self._n_lines = offset, n_lines
            offset += len(line)
        self.n_earlier_runs = max(0, n_runs - 1)

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise UnreadableEventsError(f"{self.path} has a line of more than {MAX_LINE_BYTES >> 20} MiB: it is no event file")
            yield line

    def _event(self, line: bytes) -> AnyEvent | None:
        event: AnyEvent | None = None
        try:
            event = EVENT.validate_json(line)
            version: int | None = event.v
        except ValidationError:
            version = _version(line)
        if version not in (None, EVENTS_VERSION):
            written = f"written with events version {version}, and this dist_tune reads version {EVENTS_VERSION}"
            raise UnreadableEventsError(f"{self.path}, line {self._n_lines}: {written}")
        return event


def _version(line: bytes) -> int | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    version = found.get("v") if isinstance(found, dict) else None
    return version if isinstance(version, int) else None
