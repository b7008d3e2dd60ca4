"""Journal of a tuning in progress: times, failures and the configs under way, from which an interrupted tuning goes on.

Append-only, one line with its checksum per event. Knows files and indices of candidates; nothing of kernels, ranks or search. A line is
written before candidates run (``begin``) and after (``end``), so that the next process knows which candidates were running when this one
died. These are suspects: they run last and in small rounds; a second death with a suspect alone puts it into quarantine.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter

from dist_tune.cache import sealed_line
from dist_tune.offline.journal_lines import JournalLine, raw_lines, sound_lines
from dist_tune.safe_files import PRIVATE, make_folder, opener
from dist_tune.warn_once import warn_once

MAX_STRIKES = 2
"""Deaths of the process with a candidate under way that put it into quarantine; in the last one it must have been alone."""
_INCUMBENT = "champion"
"""Key in the file, whose format stays."""


@dataclass
class Progress:
    """State of one problem's search, as its journal gives it and as rounds extend it."""

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")

    latencies_ms: dict[int, float] = field(default_factory=dict)
    """Candidate -> time."""
    failures: dict[int, str] = field(default_factory=dict)
    """Candidate -> reason."""
    incumbent: int | None = None
    strikes: Counter[int] = field(default_factory=Counter)
    """Candidate -> deaths of the process while it was under way."""
    is_done: bool = False
    """The search has ended, and the incumbent is the winner."""
    budget_s: float | None = None
    """Budget that ended the search; None if it ended by itself."""

    @property
    def quarantined(self) -> dict[int, str]:
        """Candidates that must not run again, with the reason."""
        return {i: f"the process ended {n} times while this config ran" for i, n in self.strikes.items() if n >= MAX_STRIKES}

    @property
    def valid_ms(self) -> dict[int, float]:
        """Times of the candidates that have not failed since."""
        return {i: ms for i, ms in self.latencies_ms.items() if i not in self.failures}

    @property
    def n_tried(self) -> int:
        """Candidates measured or dropped."""
        return len(self.latencies_ms) + len(self.failures)

    def add(self, later: Progress) -> None:
        """Take in the results of a round, which replace older ones."""
        self.latencies_ms |= later.latencies_ms
        self.failures |= later.failures
        self.incumbent = later.incumbent
        if later.incumbent is None or later.incumbent in self.failures:  # it ran before, and fails now
            times = self.valid_ms
            self.incumbent = min(times, key=lambda i: (times[i], i), default=None)

    def to_json(self) -> str:
        """Text for other ranks."""
        return _PROGRESS.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """Progress from another rank's text; empty from an empty text."""
        return _PROGRESS.validate_json(text or "{}")


_PROGRESS = TypeAdapter(Progress)


class Journal:
    """Journal of one problem; in memory alone where it cannot be written or another process has it.

    ``identity``: digest of all that measurements depend on, ``values`` the same by name, for people. A journal of another identity is begun
    anew. ``n_candidates``: lines that name more are left out, as are all that no journal writes.
    """

    def __init__(self, path: Path | None, identity: str, n_candidates: int | None = None, values: Mapping[str, str] | None = None) -> None:
        self.progress = Progress()
        self.is_new = True
        """There was none of this identity."""
        self._n_candidates = n_candidates
        self.is_kept = path is not None
        """The next process will find it."""
        self._path = path
        self._lock: FileLock | None = None
        try:
            if path is not None:
                self._open(path, {"t": "open", "identity": identity, "values": dict(values or {})})
        except (Timeout, NotImplementedError):
            self.is_kept = False
        except OSError as error:
            self._fail(error)

    def begin(self, candidates: Iterable[int]) -> None:
        """Note that these run from now on."""
        self._append({"t": "begin", "candidates": list(candidates)}, is_synced=False)

    def end(self, latencies_ms: dict[int, float], failures: dict[int, str], incumbent: int | None) -> None:
        """Note the results of the candidates under way."""
        self._append({"t": "end", "ms": latencies_ms, "failed": failures, _INCUMBENT: incumbent})

    def stop(self) -> None:
        """Note an interruption that the candidates under way have not caused."""
        self._append({"t": "stop"})

    def finish(self, winner: int, budget_s: float | None) -> None:
        """Note the end of the search; ``budget_s`` if that ended it."""
        self._append({"t": "done", _INCUMBENT: winner, "budget_s": budget_s})

    def close(self, *, delete: bool = False) -> None:
        """Release it for other processes, or ``delete`` it where no process is to go on from it."""
        if self._lock is not None and self._path is not None:
            if delete:
                forget(self._path)
            with suppress(OSError):
                self._lock.release()

    def _open(self, path: Path, head: dict[str, Any]) -> None:
        make_folder(path.parent)
        lock = FileLock(f"{path}.lock", mode=PRIVATE.file)
        lock.acquire(timeout=0)
        self._lock = lock
        lines = raw_lines(path)
        entries = sound_lines(path, lines, self._n_candidates)
        if entries and (entries[0].t, entries[0].identity) == ("open", head["identity"]):
            self.is_new = False
            self.progress = _replayed(entries)
        else:
            lines = []
            path.unlink(missing_ok=True)
        # Strikes candidates that the last process left under way, however this process ends. A torn line is ended first.
        self._append(head, before=b"\n" if lines and lines[-1] else b"")

    def _fail(self, error: OSError) -> None:
        self.is_kept = False
        warn_once(f"the tuning goes on without its journal: {self._path} cannot be used ({error.strerror or error})", topic=f"{self._path}")

    def _append(self, entry: dict[str, Any], *, is_synced: bool = True, before: bytes = b"") -> None:
        if self._path is None or not self.is_kept:
            return
        text = json.dumps(entry).encode()
        try:
            with open(self._path, "ab", opener=opener(follows_links=False)) as file:
                file.write(before + sealed_line(text))
                file.flush()
                if is_synced:  # the page cache outlives the process, but not the machine
                    os.fsync(file.fileno())
        except OSError as error:
            self._fail(error)


def forget(path: Path) -> None:
    """Delete a journal and its lock."""
    for each in (path, Path(f"{path}.lock")):
        with suppress(OSError):
            each.unlink(missing_ok=True)


@contextmanager
def raising_on_termination() -> Iterator[None]:
    """Let SIGTERM, by which launchers and schedulers stop a process, raise ``SystemExit``, so that the journal can note the interruption.

    A handler of the user's stays, and threads other than the main one are left as they are.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _replayed(entries: list[JournalLine]) -> Progress:
    progress = Progress()
    under_way: list[int] = []

    def strike() -> None:
        # In company a candidate gets one strike at most: one of them is the cause, and the others are not.
        progress.strikes.update(under_way if len(under_way) == 1 else [i for i in under_way if not progress.strikes[i]])

    for entry in entries:
        if entry.t in ("begin", "open"):
            strike()
        under_way = entry.candidates if entry.t == "begin" else []
        if entry.t == "end":
            progress.latencies_ms |= entry.ms
            progress.failures |= entry.failed
        if _INCUMBENT in entry.model_fields_set:
            progress.incumbent = entry.champion
        progress.is_done = entry.t == "done" and entry.champion is not None
        progress.budget_s = entry.budget_s
    strike()
    return progress
