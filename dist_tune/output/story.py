"""The story of one tuning on this rank: each fact is one event, written once, to all who read it.

Programs read it in ``rank-<i>.jsonl``, a restart in the journal, people on the terminal. Knows numbers and texts; nothing of kernels, ranks
or how facts come about. Costs a set's look-up in a launch, and nothing in a steady call.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from dist_tune.errors import Failures
from dist_tune.files import json_bytes
from dist_tune.output import events
from dist_tune.output.log import Logger, RankFile, run_facts
from dist_tune.output.terminal import Terminal
from dist_tune.output.words import amount, closure_name, site_names


class CompiledCandidate(NamedTuple):
    """A compilation that a thread has ended."""

    label: str
    candidate: int
    ended_at: float
    """Seconds since 1970."""
    seconds: float
    worker: int
    is_cached: bool


class Story:
    """One tuning's events and progress, and the short numbers of its sites."""

    def __init__(self, tuning: str, world_size: int, folder: Path, rank: int, terminal: Terminal) -> None:
        self.numbers: dict[str, int] = {}
        """Label -> short number; a label that was given up keeps its number."""
        self.meetings: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        """Topic -> number of meetings, and seconds."""
        self.log: Logger
        self.terminal = terminal
        self.path = folder / f"rank-{rank}.log"
        self._rank, self._tuning, self._world_size = rank, tuning, world_size
        self._file = RankFile(folder / f"rank-{rank}.jsonl", self._header)
        self._journal: Callable[[bytes], None] | None = None
        self._pending: list[bytes] = []
        self._is_begun = False
        """True once there is something to tell: a site, or an error."""
        self._lock = Lock()
        """Warnings come from any thread."""
        self._closure = ""
        self._sites: dict[str, dict[str, Any]] = {}
        """Label -> fields of the site's event."""
        self._started: set[tuple[str, int]] = set()
        self._dropped: set[tuple[str, int]] = set()
        self._left: defaultdict[str, set[int]] = defaultdict(set)
        self._replays: list[tuple[int, float, float, Mapping[str, int]]] = []
        """Number, end, seconds and candidates of replays whose batch goes on."""
        self._phase: events.Phase = "discover"
        self._best_ms: dict[str, float] = {}

    # -- writing -------------------------------------------------------------------------------------------------

    def emit(self, event: type[events.Event], site: str | None = None, /, *, at: float | None = None, **fields: Any) -> None:
        """Write an event, of now unless ``at`` says when, and of a site, by its label, if that is known.

        It is on disk at the next ``flush`` after the first site, so that a call with nothing to tune leaves none.
        """
        if site is not None:
            if site not in self.numbers:
                return
            fields["site"] = self.numbers[site]
        try:
            line = self._line(event, at, fields)
        except ValueError:  # a time that is no number: no event is worth a tuning
            return
        with self._lock:
            if self._journal is not None and event in events.OF_JOURNALS:
                self._journal(line)
            if event not in events.OF_JOURNALS_ALONE:
                self._pending.append(line)

    def flush(self) -> None:
        """Write what was added, so that it outlives this process."""
        if self._is_begun and self._pending:
            with self._lock:
                pending, self._pending = self._pending, []
                self._file.write(b"".join(pending))

    def open_journal(self, write: Callable[[bytes], None]) -> None:
        """From here on, what a restart reads is written there, too; a header begins each attempt."""
        self._journal = write
        write(self._header())

    def _header(self) -> bytes:
        return self._line(events.RunBegun, None, {"tuning": "", "world_size": self._world_size, **run_facts()})

    def _line(self, event: type[events.Event], at: float | None, fields: Mapping[str, Any]) -> bytes:
        """An event as a line. Not by its model, because validation would take longer than the rest of it.

        Raises:
            ValueError: a number is none.
        """
        kind, now = event.model_fields["kind"].default, time.time() if at is None else at
        values = {"v": events.EVENTS_VERSION, "at": now, "rank": self._rank, "tuning": self._tuning, "kind": kind, **fields}
        line = json_bytes(values)
        if b"NaN" in line or b"Infinity" in line:  # perhaps within a text
            json.dumps(values, allow_nan=False, default=str)
        return line + b"\n"

    # -- the tuning ----------------------------------------------------------------------------------------------

    def begin(self, closure: str, log: Logger, options: Mapping[str, str | int | float | bool | None]) -> None:
        """The tuning begins; it is written when the first site is met. ``log``: takes the lines of sites."""
        self.log, self._closure = log, closure
        self.emit(events.TuningBegun, closure=closure, world_size=self._world_size, options=dict(options))
        self.emit(events.PhaseBegun, phase=self._phase)

    def phase(self, name: events.Phase, bound: int | None = None) -> None:
        """A phase begins, unless it goes on."""
        if name != self._phase:
            self._phase = name
            self.emit(events.PhaseBegun, phase=name, bound=bound)
            self.flush()
            self.terminal.begin_phase(name)

    def met(self, topic: str, seconds: float) -> None:
        """A meeting has ended."""
        n, before_s = self.meetings[topic]
        self.meetings[topic] = n + 1, before_s + seconds
        self.emit(events.Met, topic=topic, seconds=seconds)
        self.log.debug(f"meeting={topic!r} seconds={seconds:.4f}")

    def told(self, level: str, text: str) -> None:
        """A line of the log, of level WARNING or above."""
        self.emit(events.Told, level=level, text=text)
        self.flush()

    def broken(self, error: str, seconds: Mapping[str, float], n_replays: int) -> None:
        """An error has ended the tuning."""
        self.log.error(f"closure={self._closure} ended by {error}")
        self._is_begun = True
        self.emit(events.TuningEnded, error=error, seconds=dict(seconds), n_replays=n_replays)

    def close(self) -> None:
        """Write what is left; the terminal's live line goes."""
        self.end_batch(lambda replay: "")
        self.terminal.end()
        self._file.close()

    # -- sites and candidates ------------------------------------------------------------------------------------

    def site(
        self, label: str, named: tuple[str, str], configs: Sequence[str], n_pruned: int = 0, miss: str = "", cache_key: str = ""
    ) -> None:
        """A site is tuned. ``named``: kernel and key. ``cache_key``: the digest of its key in the cache."""
        known = self._sites.get(label)
        if known is not None and not miss:
            return
        if known is None:
            self.numbers.setdefault(label, len(set(self.numbers.values())) + 1)
            more = f", prune rules took out {n_pruned} more" if n_pruned else ""
            self.log.info(f"site {self.numbers[label]} = {label}: {amount(len(configs), 'config')}{more}")
            known = {"kernel": named[0], "key": named[1], "n_pruned": n_pruned, "cache_key": cache_key}
        pruned = n_pruned or known["n_pruned"]
        self._sites[label] = {**known, "label": label, "configs": list(configs), "n_pruned": pruned, "miss": miss}
        self.emit(events.SiteMet, label, **self._sites[label])
        self._is_begun = True
        self.flush()

    def rename(self, labels: Mapping[str, str]) -> None:
        """Sites have other labels from now on, and keep their numbers: old -> new."""
        for old, new in labels.items():
            if old in self._sites:
                self.numbers[new] = self.numbers[old]
                self._sites[new] = {**self._sites.pop(old), "label": new}
                self.emit(events.SiteMet, new, **self._sites[new])

    def spelled(self, line: str, *, for_people: bool = False) -> str:
        """A line of the log with the numbers of sites in place of their labels; ``for_people`` with names of sites and closure."""
        names = {label: f"site {number}" for label, number in self.numbers.items()} if "site=" in line else {}
        if for_people:
            line = line.replace(f"closure={self._closure} ", f"{closure_name(self._closure)} ") if self._closure else line
            sites = [(each["kernel"], each["key"]) for each in self._sites.values()]
            names = dict(zip(self._sites, site_names(sites, list(self._sites)), strict=True)) if names else {}
        for label in sorted(names, key=len, reverse=True):  # one label may begin with another
            line = line.replace(f"site={label}", names[label])
        return line

    def starting(self, candidates: Mapping[str, int], replay: int) -> None:
        """Before launches, by label: those that were never launched are written, because they may hang."""
        if new := [each for each in candidates.items() if each not in self._started and each[0] in self.numbers]:
            self._started.update(new)
            for label, candidate in new:
                self.emit(events.Started, label, candidate=candidate, replay=replay)
            self.flush()

    def compiled(self, ended: deque[CompiledCandidate]) -> None:
        """Compilations have ended, and are taken out of the queue; those inside functions count for the function's site."""
        for each in [ended.popleft() for _ in range(len(ended))]:
            label = each.label if each.label in self.numbers else each.label.partition(" > ")[0]
            fields: dict[str, Any] = {"candidate": each.candidate, "worker": each.worker, "is_cached": each.is_cached}
            self.emit(events.Compiled, label, at=each.ended_at, seconds=each.seconds, **fields)

    def dropped(self, failures: Failures) -> None:
        """Candidates cannot run, here or on another rank; each is told once."""
        for label, found in failures.items():
            for candidate, (kind, reason) in found.items():
                if (label, candidate) not in self._dropped and label in self.numbers:
                    self._dropped.add((label, candidate))
                    self.emit(events.Dropped, label, candidate=candidate, failure=str(kind), reason=reason)

    def under_way(self, candidates: Iterable[tuple[str, int]], *, is_alone: bool) -> None:
        """These, (label, candidate), run from here on, and no others."""
        known = [(self.numbers[label], i) for label, i in candidates if label in self.numbers]
        self.emit(events.UnderWay, candidates=known, is_alone=is_alone)

    # -- replays -------------------------------------------------------------------------------------------------

    def replayed(self, number: int, seconds: float, candidates: Mapping[str, int]) -> None:
        """A replay of these candidates, by label, has ended on the host; it is written with its batch."""
        self._replays.append((number, time.time(), seconds, candidates))

    def end_batch(self, why_discarded: Callable[[int], str]) -> None:
        """The device is through with a batch. ``why_discarded``: the reason why a replay does not count, by its number."""
        replays, self._replays, numbers = self._replays, [], self.numbers
        for number, ended_at, seconds, candidates in replays:
            launched = {numbers[label]: i for label, i in candidates.items() if label in numbers}
            fields: dict[str, Any] = {"seconds": seconds, "candidates": launched, "discarded": why_discarded(number)}
            self.emit(events.Replayed, at=ended_at, replay=number, **fields)
        self.flush()

    def rung(self, label: str, alive: Collection[int], best: tuple[int, float], left: Mapping[int, str]) -> None:
        """After a batch: tell who has left since the last time, if some have. ``best``: candidate and its milliseconds."""
        new = {i: reason for i, reason in left.items() if i not in self._left[label]}
        if isfinite(best[1]):
            self._best_ms[label] = best[1]
            self.terminal.best_ms = sum(self._best_ms.values())
        if new:
            self._left[label].update(new)
            self.emit(events.Ranked, label, n_left=len(alive), best=best[0], best_ms=best[1], left=new)
