"""The story of one tuning on this rank: what happened, once for programs and once for people.

Each fact has one verb here; it becomes an event in ``rank-<i>.jsonl`` and, where people read it, a line of the log or of the terminal.
Knows numbers and texts; nothing of kernels, ranks or how facts come about. Costs a set's look-up in a launch, and nothing in a steady call.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dist_tune.errors import Failures
from dist_tune.output import events
from dist_tune.output.event_file import EventFile
from dist_tune.output.short_names import closure_name, site_names
from dist_tune.output.terminal import Terminal
from dist_tune.output.words import amount

if TYPE_CHECKING:
    from dist_tune.output.logger import Logger


class Scheduled(Protocol):
    """A site's part in a replay."""

    @property
    def candidate(self) -> int:
        """The candidate that it launches."""


class Timed(Protocol):
    """Times of a candidate that all ranks have agreed on, in milliseconds."""

    @property
    def kernel_ms(self) -> float:
        """One launch on the slowest rank."""

    @property
    def closure_ms(self) -> float:
        """The step."""

    @property
    def spread_ms(self) -> float:
        """Median absolute deviation of the launches."""

    @property
    def n_replays(self) -> int:
        """Replays that count."""


class Journal(Protocol):
    """A file of lines that a restart reads."""

    def write(self, line: bytes) -> None:
        """Add a line."""


class CompiledCandidate(NamedTuple):
    """A compilation that a thread has ended."""

    label: str
    candidate: int
    ended_at: float
    """Seconds since 1970."""
    seconds: float
    worker: int
    is_cached: bool


class _Replay(NamedTuple):
    number: int
    ended_at: float
    seconds: float
    schedule: Mapping[str, Scheduled]


class Story:
    """One tuning's events and progress, and the short numbers of its sites."""

    def __init__(self, tuning: str, world_size: int, folder: Path, rank: int, terminal: Terminal) -> None:
        self.numbers: dict[str, int] = {}
        """Label -> short number; a label that was given up keeps its number."""
        self.meetings: Counter[str] = Counter()
        """Topic -> number of meetings."""
        self.meeting_s: defaultdict[str, float] = defaultdict(float)
        """Topic -> seconds."""
        self.n_pruned: dict[str, int] = {}
        self.misses: dict[str, str] = {}
        """Label -> reason why no record could be used."""
        self.log: Logger
        self.terminal = terminal
        self.path = folder / f"rank-{rank}.log"
        self._closure = ""
        self._world_size = world_size
        self._events = EventFile(folder, rank, tuning, world_size)
        self._cache_keys: dict[str, str] = {}
        self._sites: dict[str, tuple[str, str, list[str]]] = {}
        self._started: set[tuple[str, int]] = set()
        self._dropped: set[tuple[str, int]] = set()
        self._left: dict[str, set[int]] = {}
        self._replays: list[_Replay] = []
        self._phase: events.Phase = "discover"
        self._best_ms: dict[str, float] = {}

    # -- the tuning ----------------------------------------------------------------------------------------------

    def begin(self, closure: str, log: Logger, options: Mapping[str, str | int | float | bool | None]) -> None:
        """The tuning begins; it is written when the first site is met. ``log``: takes the lines of sites."""
        self.log, self._closure = log, closure
        self._events.add(events.TuningBegun, closure=closure, world_size=self._world_size, options=dict(options))
        self._events.add(events.PhaseBegun, phase=self._phase)

    def phase(self, name: events.Phase, bound: int | None = None) -> None:
        """A phase begins, unless it goes on."""
        if name == self._phase:
            return
        self._phase = name
        self._events.add(events.PhaseBegun, phase=name, bound=bound)
        self._events.flush()
        self.terminal.begin_phase(name)

    def met(self, topic: str, seconds: float) -> None:
        """A meeting has ended."""
        self.meetings[topic] += 1
        self.meeting_s[topic] += seconds
        self._events.add(events.Met, topic=topic, seconds=seconds)

    def told(self, level: str, text: str) -> None:
        """A line of the log, of level WARNING or above."""
        self._events.add(events.Told, level=level, text=text)
        self._events.flush()

    def ended(self, seconds: Mapping[str, float], n_replays: int, first_ms: float | None, best_ms: float | None) -> None:
        """All sites have their configs."""
        self._events.add(events.TuningEnded, seconds=dict(seconds), n_replays=n_replays, first_ms=first_ms, best_ms=best_ms)

    def broken(self, error: str, seconds: Mapping[str, float], n_replays: int) -> None:
        """An error has ended the tuning."""
        self._events.begin()
        self._events.add(events.TuningEnded, error=error, seconds=dict(seconds), n_replays=n_replays)

    def close(self) -> None:
        """Write what is left; the terminal's live line goes."""
        self.end_batch(lambda replay: "")
        self.terminal.end()
        self._events.close()

    # -- sites and candidates ------------------------------------------------------------------------------------

    def site(
        self, label: str, named: tuple[str, str], configs: Sequence[str], n_pruned: int = 0, miss: str = "", cache_key: str = ""
    ) -> None:
        """A site is tuned. ``named``: kernel and key. ``cache_key``: the digest of its key in the cache."""
        if label in self._sites and not miss:
            return
        self.numbers.setdefault(label, len(set(self.numbers.values())) + 1)
        is_new = label not in self._sites
        self._sites[label] = *named, list(configs)
        self.n_pruned[label] = n_pruned or self.n_pruned.get(label, 0)
        self.misses[label] = miss
        self._cache_keys[label] = cache_key or self._cache_keys.get(label, "")
        self._add_site(label)
        self._events.begin()
        if not is_new:
            return
        pruned = f", prune rules took out {self.n_pruned[label]} more" if self.n_pruned[label] else ""
        self.log.info(f"site {self.numbers[label]} = {label}: {amount(len(configs), 'config')}{pruned}")

    @property
    def names(self) -> dict[str, str]:
        """Label -> the site's name for people."""
        sites = [(kernel, key) for kernel, key, _ in self._sites.values()]
        return dict(zip(self._sites, site_names(sites, list(self._sites)), strict=True))

    def for_people(self, line: str) -> str:
        """A line of the log as the terminal shows it: sites and the closure by their short names."""
        # The longest first: one label may begin with another.
        for label, name in sorted(self.names.items(), key=lambda each: -len(each[0])) if "site=" in line else ():
            line = line.replace(f"site={label}", name)
        return line.replace(f"closure={self._closure} ", f"{closure_name(self._closure)} ") if self._closure else line

    def rename(self, labels: Mapping[str, str]) -> None:
        """Sites have other labels from now on, and keep their numbers: old -> new."""
        for old, new in labels.items():
            if old in self._sites:
                self.numbers[new] = self.numbers[old]
                self._sites[new] = self._sites.pop(old)
                self.n_pruned[new], self.misses[new] = self.n_pruned.pop(old), self.misses.pop(old)
                self._cache_keys[new] = self._cache_keys.pop(old)
                self._add_site(new)

    def _add_site(self, label: str) -> None:
        kernel, key, configs = self._sites[label]
        fields: dict[str, Any] = {"n_pruned": self.n_pruned[label], "miss": self.misses[label], "cache_key": self._cache_keys[label]}
        self._events.add(events.SiteMet, site=self.numbers[label], label=label, kernel=kernel, key=key, configs=configs, **fields)

    def starting(self, schedule: Mapping[str, Scheduled], replay: int) -> None:
        """Before a replay: those of its candidates that were never launched are written, because they may hang."""
        self._start([(label, trial.candidate) for label, trial in schedule.items()], replay)

    def _start(self, candidates: Iterable[tuple[str, int]], replay: int) -> None:
        if new := [each for each in candidates if each not in self._started and each[0] in self.numbers]:
            self._started.update(new)
            for label, candidate in new:
                self._events.add(events.Started, site=self.numbers[label], candidate=candidate, replay=replay)
            self._events.flush()

    def launching(self, label: str, candidate: int, replay: int) -> None:
        """Before a launch; costs a look-up if the candidate has been launched, or told of, before."""
        if (label, candidate) not in self._started:
            self._start([(label, candidate)], replay)

    def compiled(self, ended: deque[CompiledCandidate]) -> None:
        """Compilations have ended, and are taken out of the queue; those inside functions count for the function's site."""
        for each in [ended.popleft() for _ in range(len(ended))]:
            number = self.numbers.get(each.label) or self.numbers.get(each.label.partition(" > ")[0])
            if number is not None:
                fields: dict[str, Any] = {"candidate": each.candidate, "worker": each.worker, "is_cached": each.is_cached}
                self._events.add(events.Compiled, at=each.ended_at, site=number, seconds=each.seconds, **fields)

    def dropped(self, failures: Failures) -> None:
        """Candidates cannot run, here or on another rank; each is told once."""
        for label, found in failures.items():
            for candidate, (kind, reason) in found.items():
                if (label, candidate) not in self._dropped and label in self.numbers:
                    self._dropped.add((label, candidate))
                    self._events.add(events.Dropped, site=self.numbers[label], candidate=candidate, failure=str(kind), reason=reason)

    # -- for a restart -------------------------------------------------------------------------------------------

    def open_journal(self, journal: Journal) -> None:
        """From here on, what a restart reads is written there, too."""
        self._events.open_journal(journal)

    def agreed(self, times: Mapping[str, Mapping[int, Timed]]) -> None:
        """After a meeting: site -> candidate -> times, the same on all ranks."""
        for label, each in times.items():
            if label in self.numbers and each:
                told = {i: ((t.kernel_ms, t.closure_ms, t.spread_ms), t.n_replays) for i, t in each.items()}
                self._events.add(events.Agreed, site=self.numbers[label], times=told)

    def under_way(self, candidates: Iterable[tuple[str, int]], *, is_alone: bool) -> None:
        """These run from here on, and no others."""
        known = [(self.numbers[label], i) for label, i in candidates if label in self.numbers]
        self._events.add(events.UnderWay, candidates=known, is_alone=is_alone)

    def died(self, label: str, deaths: Mapping[int, int]) -> None:
        """Candidates of a site -> deaths of processes while they were under way."""
        if label in self.numbers and deaths:
            self._events.add(events.Died, site=self.numbers[label], deaths=deaths)

    # -- replays -------------------------------------------------------------------------------------------------

    def replayed(self, number: int, seconds: float, schedule: Mapping[str, Scheduled]) -> None:
        """A replay has ended on the host; it is written with its batch."""
        self._replays.append(_Replay(number, time.time(), seconds, schedule))

    def end_batch(self, why_discarded: Callable[[int], str]) -> None:
        """The device is through a batch. ``why_discarded``: the reason why a replay does not count, by its number."""
        replays, self._replays, numbers = self._replays, [], self.numbers
        for each in replays:
            launched = {numbers[label]: trial.candidate for label, trial in each.schedule.items() if label in numbers}
            fields: dict[str, Any] = {"seconds": each.seconds, "candidates": launched, "discarded": why_discarded(each.number)}
            self._events.add(events.Replayed, at=each.ended_at, replay=each.number, **fields)
        self._events.flush()

    def rung(self, label: str, alive: Collection[int], best: tuple[int, float], left: Mapping[int, str]) -> None:
        """After a batch: tell who has left since the last time, if some have. ``best``: candidate and its milliseconds."""
        known = self._left.setdefault(label, set())
        new = {i: reason for i, reason in left.items() if i not in known}
        if isfinite(best[1]):
            self._best_ms[label] = best[1]
            self.terminal.best_ms = sum(self._best_ms.values())
        if new and label in self.numbers:
            known.update(new)
            fields: dict[str, Any] = {"n_left": len(alive), "best": best[0], "best_ms": best[1], "left": new}
            self._events.add(events.Ranked, site=self.numbers[label], **fields)

    def won(self, label: str, winner: int, reason: str, record_id: str, record: dict[str, Any]) -> None:
        """A site has its config."""
        if label in self.numbers:
            fields: dict[str, Any] = {"winner": winner, "reason": reason, "record_id": record_id, "record": record}
            self._events.add(events.Won, site=self.numbers[label], **fields)
