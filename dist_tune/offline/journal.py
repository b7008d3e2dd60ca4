"""The account of a tuning in progress, from which an interrupted one goes on: what was measured, what failed, what was under way.

Append-only, one checked line each. Knows files and indices of candidates; nothing of kernels, ranks or search. A line is written before
candidates run (``begin``) and after (``end``), so that candidates which end the process are known to the next one: those that were under
way are suspects, which run last and in small rounds, and what was twice under way alone or among suspects is quarantined.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

MAX_STRIKES = 2
"""Times that the process may end while a candidate is among those under way; the last time it must have been the only one."""


@dataclass
class Progress:
    """What a journal says."""

    latencies_ms: dict[int, float] = field(default_factory=dict)
    """Candidate -> time."""
    failures: dict[int, str] = field(default_factory=dict)
    """Candidate -> why it cannot run."""
    incumbent: int | None = None
    """The best so far."""
    strikes: Counter[int] = field(default_factory=Counter)
    """Candidate -> how often the process ended while it was under way."""
    is_done: bool = False
    """Whether the champion has won."""
    budget_s: float | None = None
    """After how long the search was ended, if not by itself."""

    @property
    def quarantined(self) -> dict[int, str]:
        """Candidates that are not to run again, and why."""
        return {i: f"the process ended {n} times while this config ran" for i, n in self.strikes.items() if n >= MAX_STRIKES}

    def to_json(self) -> str:
        """For other ranks."""
        return json.dumps(vars(self))  # asdict() makes a Counter of a Counter's items

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """As it was told by another rank; empty from nothing."""
        values = json.loads(text or "{}")
        for name in ("latencies_ms", "failures", "strikes"):
            values[name] = {int(i): value for i, value in values.get(name, {}).items()}
        return cls(**{**values, "strikes": Counter(values["strikes"])})


class Journal:
    """The journal of one problem. Where it cannot be written, or another process has it, it is kept in memory alone.

    ``identity``: a digest of all that measurements depend on; a journal of anything else is begun anew.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self.progress = Progress()
        self.is_kept = False
        """Whether the next process will find it."""
        self._path = path
        self._identity = identity
        self._lock: FileLock | None = None
        if path is not None:
            self._open(path)

    def begin(self, candidates: Iterable[int]) -> None:
        """These run from now on."""
        self._append({"t": "begin", "candidates": list(candidates)}, is_synced=False)

    def end(self, latencies_ms: Mapping[int, float], failures: Mapping[int, str], incumbent: int | None) -> None:
        """What came of those under way."""
        self._append({"t": "end", "ms": _by_text(latencies_ms), "failed": _by_text(failures), "champion": incumbent})

    def stop(self) -> None:
        """Those under way were interrupted, and it was not their doing."""
        self._append({"t": "stop"})

    def finish(self, incumbent: int, budget_s: float | None) -> None:
        """The search is over; by its budget, if that is given."""
        self._append({"t": "done", "champion": incumbent, "budget_s": budget_s})

    def close(self, *, delete: bool = False) -> None:
        """Let others have it; ``delete`` if nobody will go on from it."""
        if self._lock is None or self._path is None:
            return
        lock, self._lock = self._lock, None
        if delete:
            forget(self._path)
        with suppress(OSError):
            lock.release()

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{path}.lock")
            lock.acquire(timeout=0)
            self._lock, self.is_kept = lock, True
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            entries = [entry for line in lines if (entry := _parsed(line)) is not None]
            if entries and entries[0] == self._head:
                self.progress = _replayed(entries)
                if lines[-1]:  # torn off by the end of a process: the next line begins a new one
                    with open(path, "ab") as file:
                        file.write(b"\n")
            else:
                path.unlink(missing_ok=True)
            # What the last process had under way is held against it, however this one ends.
            self._append(self._head)
        except (OSError, Timeout, NotImplementedError):
            self.is_kept = False

    @property
    def _head(self) -> dict[str, Any]:
        return {"t": "open", "identity": self._identity}

    def _append(self, entry: dict[str, Any], *, is_synced: bool = True) -> None:
        if self._path is None or not self.is_kept:
            return
        text = json.dumps(entry).encode()
        try:
            with open(self._path, "ab") as file:
                file.write(b"%08x %s\n" % (zlib.crc32(text), text))
                file.flush()
                if is_synced:  # what is in the page cache outlives the process, and not the machine
                    os.fsync(file.fileno())
        except OSError:
            self.is_kept = False


def forget(path: Path) -> None:
    """Let nobody go on from a journal."""
    for each in (path, Path(f"{path}.lock")):
        with suppress(OSError):
            each.unlink(missing_ok=True)


def _replayed(entries: list[dict[str, Any]]) -> Progress:
    progress = Progress()
    under_way: list[int] = []
    for entry in entries:
        if entry["t"] in ("begin", "open") and under_way:
            progress.strikes.update(_struck(under_way, progress.strikes))
        under_way = entry["candidates"] if entry["t"] == "begin" else []
        if entry["t"] == "end":
            progress.latencies_ms |= {int(i): ms for i, ms in entry["ms"].items()}
            progress.failures |= {int(i): reason for i, reason in entry["failed"].items()}
        progress.incumbent = entry.get("champion", progress.incumbent)
        progress.is_done = entry["t"] == "done"
        progress.budget_s = entry.get("budget_s")
    progress.strikes.update(_struck(under_way, progress.strikes))
    return progress


def _struck(under_way: list[int], strikes: Counter[int]) -> list[int]:
    """Those that the end of the process is held against: in company once at most, for one of them is the cause and the others are not."""
    return under_way if len(under_way) == 1 else [i for i in under_way if not strikes[i]]


def _parsed(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "t" in entry else None


def _by_text(values: Mapping[int, Any]) -> dict[str, Any]:
    return {str(i): value for i, value in values.items()}
