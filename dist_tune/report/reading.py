"""Event files line by line, with limits: a file may be written meanwhile, cut off, damaged, or of another version.

Knows files and ``dist_tune.output.events``; nothing of what events mean together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
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
    """Files that hold no events of this version. The message is one line: the file, the reason, and the remedy."""


class _UnreadableError(Exception):
    """The rest of a file cannot be used. The message follows the file's name: the line, and the reason."""


def event_files(folder: Path) -> list[Path]:
    """The ``rank-<i>.jsonl`` of a folder by rank.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    found = [(int(match[1]), folder / name) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return [path for _, path in sorted(found)]


class EventFile:
    """One rank's file. Each ``read`` goes on where the one before has ended; the first begins with the file's last run.

    A damaged file costs its own events alone: ``damage`` tells of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_earlier_runs = 0
        """Runs of the job that stand before the last one and are not read."""
        self._offset = -1
        self._n_lines = 0
        """That were read, with those of earlier runs."""
        self._n_events = 0
        self._n_bad = 0
        self._first_bad = 0
        self._is_cut_off = False
        self._refusal = ""
        """The reason why the last ``read`` ended before the file's end."""

    @property
    def rank(self) -> int:
        """The rank that the file's name tells."""
        return int(self.path.stem.removeprefix("rank-"))

    @property
    def is_unusable(self) -> bool:
        """True if it holds no event and is not about to, as a file that is empty or ends within its first line may be."""
        return not self._n_events and bool(self._refusal or self._n_bad)

    @property
    def reason(self) -> str:
        """The file, the line and what is wrong there, in one line; empty for a file that is whole."""
        if self._refusal:
            return f"{self.path}{self._refusal}"
        n_bad = self._n_bad + self._is_cut_off
        line = f"{self.path}, line {self._first_bad or self._n_lines + 1}"
        if not self._n_events:
            if n_bad == 0:
                return f"{self.path}: the file is empty" if self._offset == 0 else ""
            return f"{line}: no event, nor is any other line" if self._n_bad else f"{line}: cut off, and no event stands before it"
        more = f", and so {'is 1 more line' if n_bad == 2 else f'are {n_bad - 1} more lines'}" * (n_bad > 1)
        return f"{line}: {'no event' if self._n_bad else 'cut off'}, passed over{more}" if n_bad else ""

    @property
    def damage(self) -> str:
        """The reason, and what is left out for it; empty for a file that is whole."""
        if not (reason := self.reason) or (self._n_events and not self._refusal):
            return reason
        return f"{reason}: {'the rest of ' * bool(self._n_events)}rank {self.rank} is left out"

    def read(self) -> Iterator[AnyEvent]:
        """The events that have been added; none after a place where the file cannot be read."""
        self._refusal = ""
        try:
            with open(self.path, "rb", opener=opener()) as file:
                yield from self._added(file)
        except _UnreadableError as error:
            self._refusal = str(error)
        except OSError as error:
            self._refusal = f": {error.strerror or error}"

    def _added(self, file: BinaryIO) -> Iterator[AnyEvent]:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes > MAX_FILE_BYTES:
            # A sparse file or years of runs: reading it would take minutes.
            limit = f"{n_bytes / 2**20:.0f} MiB, and at most {MAX_FILE_BYTES >> 20} MiB are read"
            raise _UnreadableError(f": {limit}: move it away, and the next tuning begins a new one")
        if self._offset < 0 or n_bytes < self._offset:  # begun anew by another job
            self._offset = self._n_lines = self._n_events = self._n_bad = self._first_bad = 0
            with suppress(_UnreadableError):  # told when the reading comes to it
                self._find_last_run(file)
        file.seek(self._offset)
        self._is_cut_off = False
        for line in self._lines(file):
            event = self._event(line)
            self._is_cut_off = event is None and not line.endswith(b"\n")
            if self._is_cut_off:  # it may be written on
                break
            self._offset += len(line)
            self._n_lines += 1
            if event is not None:
                self._n_events += 1
                yield event
            elif line.strip():
                self._n_bad += 1
                self._first_bad = self._first_bad or self._n_lines

    def _find_last_run(self, file: BinaryIO) -> None:
        offset = n_runs = 0
        for n_lines, line in enumerate(self._lines(file)):
            if _HEADER.search(line, 0, 4096):
                n_runs += 1
                self._offset, self._n_lines = offset, n_lines
                self.n_earlier_runs = n_runs - 1
            offset += len(line)

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise _UnreadableError(f", line {self._n_lines + 1}: more than {MAX_LINE_BYTES >> 20} MiB, and no event has as many")
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
            raise _UnreadableError(f", line {self._n_lines + 1}: {written}")
        return event


def _version(line: bytes) -> int | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    version = found.get("v") if isinstance(found, dict) else None
    return version if isinstance(version, int) else None
