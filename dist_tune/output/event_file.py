"""The file of a rank's events, ``rank-<i>.jsonl``: one JSON object per line, added to by each tuning of the process.

Knows files and the models of ``dist_tune.output.events``; nothing of tunings. A file that cannot be written costs one warning.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dist_tune import __version__
from dist_tune.json_bytes import json_bytes
from dist_tune.output.events import EVENTS_VERSION, OF_JOURNALS, Dropped, Event, RunBegun, SiteMet
from dist_tune.safe_files import make_folder, opener, warn_of_folder
from dist_tune.warn_once import warn_once

if TYPE_CHECKING:
    from dist_tune.output.story import Journal

_MAX_PENDING = 1000
"""Events that wait for the first site; of a call with nothing to tune there are a handful."""
_headed: set[tuple[int, Path]] = set()
"""Process and file, of files that have the header of this process."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of this process, for the headers of its log and of its events."""

    date: str
    """Local time with its offset, ISO 8601."""
    host: str
    pid: int
    command: list[str]
    device: str
    versions: dict[str, str]

    @staticmethod
    def now() -> RunFacts:
        """Of this moment; libraries that are not imported have no version."""
        torch: Any = sys.modules.get("torch")
        versions = {"dist_tune": __version__, "python": platform.python_version()}
        versions |= {
            name: str(sys.modules[name].__version__) for name in ("torch", "triton") if hasattr(sys.modules.get(name), "__version__")
        }
        device = platform.machine()
        if torch is not None and torch.cuda.is_available():
            device, versions["cuda"] = torch.cuda.get_device_name(), str(torch.version.cuda)
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        command = [_clean(each) for each in getattr(sys, "orig_argv", sys.argv)]
        return RunFacts(date, _clean(socket.gethostname()), os.getpid(), command, device, versions)


class EventFile:
    """The events of one tuning on this rank. Events wait until ``begin``, so that a call with nothing to tune leaves none."""

    def __init__(self, folder: Path, rank: int, tuning: str, world_size: int) -> None:
        self._path = folder / f"rank-{rank}.jsonl"
        self._rank, self._tuning, self._world_size = rank, tuning, world_size
        self._pending: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._is_begun = self._is_over = False
        self._journal: Journal | None = None
        self._lock = threading.Lock()
        """Warnings come from any thread."""

    def add(self, event: type[Event], at: float | None = None, **fields: Any) -> None:
        """Add an event, of now unless ``at`` says when; it is written at the next ``flush``."""
        if self._is_over and self._journal is None:
            return
        try:
            line = _line(event, time.time() if at is None else at, self._rank, self._tuning, fields)
        except ValueError:  # a time that is no number: no event is worth a tuning
            return
        with self._lock:
            if self._journal is not None and event in (*OF_JOURNALS, SiteMet, Dropped):
                self._journal.write(line)
            if event not in OF_JOURNALS and not self._is_over:
                self._pending.append(line)
            if not self._is_begun:
                del self._pending[:-_MAX_PENDING]

    def open_journal(self, journal: Journal) -> None:
        """Write what a restart reads to a file of its own, too; a header begins each attempt there."""
        self._journal = journal
        journal.write(self._head())

    def begin(self) -> None:
        """Write from here on, and what waited."""
        self._is_begun = True
        self.flush()

    def flush(self) -> None:
        """Write what was added, so that it outlives this process."""
        if not self._is_begun or self._is_over or not self._pending:
            return
        with self._lock:
            pending, self._pending = self._pending, []
            try:
                if self._file is None:
                    self._file = self._open()
                    pending[:0] = self._header()
                self._file.write(b"".join(pending))
                self._file.flush()
            except (OSError, ValueError) as error:  # a full disk; a path with a null character
                is_link = isinstance(error, OSError) and error.errno == errno.ELOOP
                told = "it is a symbolic link" if is_link else error
                # The log's topic, too: both files have one reason, and one warning.
                reason = f"{self._path} cannot be written ({told}). DIST_TUNE_LOG_DIR names another folder"
                warn_once(f"dist_tune keeps no events: {reason}", topic=f"log in {self._path.parent}")
                self._end()

    def close(self) -> None:
        """Write the rest; later events go nowhere."""
        self.flush()
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        file, self._file = self._file, None
        self._pending.clear()
        if file is not None:
            with suppress(OSError, ValueError):
                file.close()

    def _open(self) -> IO[bytes]:
        make_folder(self._path.parent)
        warn_of_folder(self._path.parent, "DIST_TUNE_LOG_DIR")
        file = open(self._path, "a+b", opener=opener(follows_links=False))  # noqa: SIM115  # closed at the end of the tuning
        with suppress(OSError):  # an earlier process may have been killed in the midst of a line
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file

    def _header(self) -> list[bytes]:
        mine = os.getpid(), self._path.absolute()
        if mine in _headed:
            return []
        _headed.add(mine)
        return [self._head()]

    def _head(self) -> bytes:
        return _line(RunBegun, time.time(), self._rank, "", {"world_size": self._world_size, **asdict(RunFacts.now())})


@cache
def _kind(event: type[Event]) -> Any:
    return event.model_fields["kind"].default


def _line(event: type[Event], at: float, rank: int, tuning: str, fields: Mapping[str, Any]) -> bytes:
    """An event as a line. Not by its model, because validation would take longer than the rest of it.

    Raises:
        ValueError: a number is none.
    """
    values = {"v": EVENTS_VERSION, "at": at, "rank": rank, "tuning": tuning, "kind": _kind(event), **fields}
    line = json_bytes(values)
    if b"NaN" in line or b"Infinity" in line:  # perhaps within a text
        json.dumps(values, allow_nan=False, default=str)
    return line + b"\n"


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
