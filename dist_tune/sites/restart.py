"""What a restart of one tuning knows of the attempts before it, and what the journal says of this
one.

Read at the first site without a record: times that ranks had agreed on, configs that failed, and
those that were under way when a process ended by itself. Knows lines of journals and candidates;
nothing of ranks: the first one brings the times to the others, each brings its deaths.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_tune.errors import (
    CandidateFailure,
    FailureKind,
    Failures,
    NoValidConfigError,
    StuckDeviceError,
)
from dist_tune.files import Told, warn_once
from dist_tune.log import Story
from dist_tune.records import (
    JOURNALS,
    LINES_SUFFIX,
    QUARANTINE,
    AnyLine,
    CacheLookup,
    Journal,
    QuarantinedConfig,
    digest,
    quarantine,
    read_quarantine,
)
from dist_tune.search import PriorTimes, Replay, Times
from dist_tune.sites.site import Site, is_fatal

MAX_DEATHS = 2
"""Deaths with a candidate under way that put it into quarantine."""
_KEPT_KINDS = (FailureKind.LAUNCH, FailureKind.WRONG_RESULT, FailureKind.CLOCK, FailureKind.STUCK)
"""The compiler finds the others again without running anything."""


@dataclass
class Attempts:
    """What earlier attempts have left of one site."""

    times: dict[int, Times] = field(default_factory=dict)
    failures: dict[int, CandidateFailure] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)


def read_attempts(journal: Iterable[AnyLine]) -> dict[str, Attempts]:
    """Digest of a cache key -> what a journal says of the site."""
    found: dict[str, Attempts] = defaultdict(Attempts)
    under_way = list[tuple[str, int]]()
    for line in [*journal, None]:
        if line is None or line.kind == "attempt":
            _count_deaths(found, under_way)
            under_way = []
        elif line.kind == "under way":
            under_way = line.candidates
        elif line.kind == "agreed":
            times = {i: Times(*ms, n_replays=n) for i, (ms, n) in line.times.items()}
            found[line.site].times.update(times)
        elif line.kind == "died":
            dict.update(found[line.site].deaths, line.deaths)
        elif line.failure in _KEPT_KINDS:
            failure = CandidateFailure(FailureKind(line.failure), line.reason)
            found[line.site].failures[line.candidate] = failure
    return found


def _count_deaths(found: Mapping[str, Attempts], under_way: list[tuple[str, int]]) -> None:
    """The end of an attempt, with all that was under way.

    Of several one is the cause: at most one that was there before counts twice.
    """
    again = [(key, i) for key, i in under_way if found[key].deaths[i]]
    for key, i in under_way:
        if len(under_way) == 1 or len(again) == 1 or (key, i) not in again:
            found[key].deaths[i] += 1


class TuningJournal:
    """The journal of one tuning; nothing is read or written without a cache, or before a site
    without a record is met.
    """

    def __init__(
        self, closure: str, rank: int, members: Sequence[int], lookup: CacheLookup, story: Story
    ) -> None:
        self._identity, self._rank, self._is_first = (
            [closure, str(rank), str(len(members)), str(os.getuid())],
            rank,
            rank == members[0],
        )
        self._lookup, self._story = lookup, story
        self._file: Journal | None = None
        self._attempts: dict[str, Attempts] = {}
        self._under_way: dict[int, list[tuple[str, int]]] = {}
        """By number of a scheduled replay; launches of a run without a schedule by negative ones,
        the outermost first.
        """
        self._keys: dict[str, str] = {}
        """Label -> digest of its cache key, of sites without a record."""
        self._marked: list[tuple[str, int]] = []
        self._dropped = Told()
        """Site and candidate."""
        self._has_run: set[tuple[str, int]] = set()
        """Known-good ones: they are not under way when they run for a site that has nothing to
        time.
        """

    def enter(self, site: Site) -> None:
        """Open the journal if it is the first site without a record, and note at the site which
        candidates must not run, or run last; nothing without a cache.
        """
        key, cache = self._lookup.key_digest(site.label), self._lookup.cache
        if not key or self._lookup.mode != "tune":
            return
        self._keys[site.label] = key
        if self._file is None:
            self._open(cache.folder / JOURNALS / f"{digest([*self._identity, key])}{LINES_SUFFIX}")
        found = self.attempts_at(site.label)
        path = cache.folder / QUARANTINE / f"{key}{LINES_SUFFIX}"
        for i, text in enumerate(site.texts):
            if found.deaths[i] >= MAX_DEATHS:
                config = QuarantinedConfig(
                    kernel=site.kernel,
                    key=site.key,
                    config=text,
                    rank=self._rank,
                    since=time.time(),
                )
                quarantine(path, config, cache.rights)
        for each in read_quarantine(path):
            reason = (
                f"quarantined, because the process of rank {each.rank} ended twice while it ran; "
                "dist-tune cache clear --quarantine lets it run again"
            )
            if each.config in site.texts:
                found.failures[site.texts.index(each.config)] = CandidateFailure(
                    FailureKind.QUARANTINED, reason
                )
        indices = range(len(site.configs))  # a damaged journal may have others
        found.failures = {i: found.failures[i] for i in indices if i in found.failures}
        found.deaths = Counter(
            {i: found.deaths[i] for i in indices if found.deaths[i] and i not in found.failures}
        )
        site.failures.update(found.failures)
        site.suspects |= found.deaths.keys() | found.failures.keys()

    def is_taken(self, wait_s: float = 0.0) -> bool:
        """True if, after so many seconds at most, another job of this user still has the journal,
        because it tunes the same.
        """
        ends_at = time.monotonic() + wait_s
        while self._file is not None and self._file.is_taken:
            if time.monotonic() >= ends_at:
                return True
            time.sleep(0.05)
            self._open(self._file.path)
        return False

    def _open(self, path: Path) -> None:
        self._file = Journal(path, self._lookup.cache.rights)
        self._attempts = read_attempts(self._file.lines)
        self._file.add("attempt", pid=os.getpid(), host=socket.gethostname(), at=time.time())

    def attempts_at(self, label: str) -> Attempts:
        """What earlier attempts have left of a site."""
        return self._attempts.setdefault(self._lookup.key_digest(label), Attempts())

    def prior(self, label: str, otherwise: PriorTimes) -> PriorTimes:
        """Times of earlier attempts, with those of other tunings (``otherwise``): all that are near
        the best race.
        """
        times = self.attempts_at(label).times
        return PriorTimes({**otherwise.times, **times}, attempt=times) if times else otherwise

    def begin_site(self, label: str, deaths: Mapping[int, int]) -> None:
        """Before a site is tuned: note the deaths of all ranks, as the next one may be another's.

        A config in quarantine begins anew.
        """
        if self._file is not None and self._file.is_taken:
            warn_once(
                "dist_tune: tuning goes on without its journal: another process is tuning the"
                f" same, and has {self._file.path}"
            )
        if (times := self.attempts_at(label).times) and self._is_first:
            told = (
                f"the times of {len(times)} candidates are taken from an earlier attempt's journal"
            )
            self._story.info(f"site={label} {told}", shown=True)
        if known := {**dict.fromkeys(self.attempts_at(label).failures, 0), **deaths}:
            self._add("died", label, deaths=known)

    def agreed(self, times: Mapping[str, Mapping[int, Times]]) -> None:
        """After a meeting: site -> candidate -> times, the same on all ranks."""
        for label, measured in times.items():
            told = {
                i: ((t.kernel_ms, t.closure_ms, t.spread_ms), t.n_replays)
                for i, t in measured.items()
            }
            self._add("agreed", label, times=told)

    def dropped(self, failures: Failures) -> None:
        """Candidates cannot run, here or on another rank; each is told once."""
        for label, found in failures.items():
            for i, (kind, reason) in found.items():
                if label in self._keys and self._dropped.is_new((label, i)):
                    self._add("dropped", label, candidate=i, failure=str(kind), reason=reason)

    def _add(self, kind: str, label: str, **fields: Any) -> None:
        if self._file is not None and label in self._keys:
            self._file.add(kind, site=self._keys[label], **fields)

    @contextmanager
    def launching(self, label: str, candidate: int) -> Iterator[None]:
        """A launch in a run without a schedule, as the first run is.

        An error by which the device is lost may be the launch's.
        """
        number, is_over = min(self._under_way, default=0) - 1, True
        self._under_way[number] = [(label, candidate)]
        self._mark()
        try:
            yield
        except BaseException as error:
            is_over = not is_fatal(error)
            raise
        finally:
            if is_over:
                self._under_way.pop(number, None)
                self._mark()

    def begin(self, replay: int, schedule: Replay) -> None:
        """Before a replay."""
        pairs = [(label, trial.candidate) for label, trial in schedule.items()]
        self._under_way[replay] = [
            pair for pair in pairs if schedule[pair[0]].is_timed or pair not in self._has_run
        ]
        self._mark()

    def end(self, replay: int, schedule: Replay) -> None:
        """When the device is through with a replay.

        The next ``begin`` says so, or ``end_batch``.
        """
        self._has_run |= {(label, trial.candidate) for label, trial in schedule.items()}
        self._under_way.pop(replay, None)

    def end_batch(self) -> None:
        """The device is through with all replays."""
        self._mark()

    def _mark(self) -> None:
        under_way = [pair for pairs in self._under_way.values() for pair in pairs]
        if self._file is not None and under_way != self._marked:
            self._marked = under_way
            known = [(self._keys[label], i) for label, i in under_way if label in self._keys]
            self._file.add("under way", candidates=known)

    def end_with(self, error: BaseException) -> None:
        """Keep it for another attempt after an error; delete it where the tuning has come to its
        end, and no config runs.
        """
        # Else what is under way may be the cause.
        if not is_fatal(error) and not isinstance(error, StuckDeviceError):
            self._under_way.clear()
            self._mark()
        self.close(delete=isinstance(error, NoValidConfigError))

    def close(self, *, delete: bool = False) -> None:
        """Leave it as after a death of the process, or ``delete`` it, because no later attempt is
        to go on from it.
        """
        if self._file is not None:
            self._file.close(delete=delete)
