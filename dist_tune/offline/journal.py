"""Journal of a tuning in progress: times, failures and the configs under way, from which an interrupted tuning goes on.

Knows the lines of a journal and indices of candidates; nothing of files, kernels, ranks or search. A line is written before candidates
run (``begin``) and after (``end``), so that the next process knows which candidates were running when this one died. These are suspects:
they run last and in small rounds; a second death with a suspect alone puts it into quarantine.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dist_tune.cache import JournalFile, is_held, text_of
from dist_tune.safe_files import read_regular

MAX_STRIKES = 2
"""Deaths of the process with a candidate under way that put it into quarantine; in the last one it must have been alone."""
_INCUMBENT = "champion"
"""Key in the file, whose format stays."""
_Index = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(ge=0)]


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


class ProblemLine(BaseModel):
    """One line, as it comes back from a disk, where it may be damaged or of another program."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    t: Literal["open", "begin", "end", "stop", "done"]
    identity: str = ""
    values: dict[str, str] = {}
    """Of the first line: what the identity is of, by name."""
    candidates: list[_Index] = []
    ms: dict[_Index, _Positive] = {}
    failed: dict[_Index, str] = {}
    champion: _Index | None = None
    strikes: dict[_Index, _Index] = {}
    """Of the line after the meeting of the ranks: deaths by candidate, the most of any rank."""
    budget_s: _Positive | None = None

    @property
    def indices(self) -> set[int]:
        """All candidates that it names."""
        return {*self.candidates, *self.ms, *self.failed, *self.strikes, *([] if self.champion is None else [self.champion])}


class Journal:
    """Journal of one problem; in memory alone where it cannot be written or another process has it.

    ``identity``: digest of all that measurements depend on, ``values`` the same by name, for people. A journal of another identity is begun
    anew. ``n_candidates``: lines that name more are left out, as are all that no journal writes.
    """

    def __init__(self, path: Path | None, identity: str, n_candidates: int | None = None, values: Mapping[str, str] | None = None) -> None:
        self.progress = Progress()
        self.is_new = True
        """There was none of this identity."""
        self._identity, self._n_candidates = identity, n_candidates
        self._file = JournalFile(path, ProblemLine, validate=self._check) if path is not None else None
        if self._file is None:
            return
        if self._file.lines and (self._file.lines[0].t, self._file.lines[0].identity) == ("open", identity):
            self.is_new = False
            self.progress = _replayed(self._file.lines)
        else:
            self._file.begin_anew()
        # Strikes candidates that the last process left under way, however this process ends.
        self._append({"t": "open", "identity": identity, "values": dict(values or {})})

    @property
    def is_kept(self) -> bool:
        """The next process will find it."""
        return self._file is not None and self._file.is_open

    def note_strikes(self, strikes: Mapping[int, int]) -> None:
        """Note deaths of all ranks: the next one may come to another."""
        if strikes:
            self._append({"t": "open", "identity": self._identity, "strikes": dict(strikes)})

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
        if self._file is not None:
            self._file.close(delete=delete)

    def _check(self, line: ProblemLine) -> None:
        unknown = [i for i in line.indices if self._n_candidates is not None and i >= self._n_candidates]
        if unknown:
            raise ValueError(f"candidate {min(unknown)} of {self._n_candidates}")

    def _append(self, entry: dict[str, Any], *, is_synced: bool = True) -> None:
        if self._file is not None:
            self._file.append(entry, is_synced=is_synced)


def forget(path: Path) -> None:
    """Delete a journal."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def other_values(path: Path, pattern: str) -> dict[str, str] | None:
    """The values of the newest journal in the folder of ``path`` that is of another identity; None if there is none."""
    with suppress(OSError):
        others = [each for each in path.parent.glob(pattern) if each != path and not is_held(each)]
        for other in sorted(others, key=lambda each: each.lstat().st_mtime, reverse=True):
            with suppress(OSError, ValueError):
                first, _, _ = read_regular(other, follows_links=False).partition(b"\n")
                return ProblemLine.model_validate_json(text_of(first) or b"").values
    return None


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


def _replayed(entries: Sequence[ProblemLine]) -> Progress:
    progress = Progress()
    under_way: list[int] = []

    def strike() -> None:
        # In company a candidate gets one strike at most: one of them is the cause, and the others are not.
        progress.strikes.update(under_way if len(under_way) == 1 else [i for i in under_way if not progress.strikes[i]])

    for entry in entries:
        if entry.t in ("begin", "open"):
            strike()
        for i, n in entry.strikes.items():
            progress.strikes[i] = max(n, progress.strikes[i])
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
