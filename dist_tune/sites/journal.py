"""The journal of one tuning on this rank, from which a tuning that was cut off goes on.

Written between replays: what is under way, what it took, who was dropped. Read at the first site without a record: the samples, the
candidates that were under way when the process died (suspects), and those in quarantine. Knows lines and candidates; nothing of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from dist_tune.cache import (
    JOURNALS,
    LINES_SUFFIX,
    QUARANTINE,
    CacheLookup,
    JournalFile,
    JournalLine,
    QuarantinedConfig,
    digest,
    quarantine,
    read_quarantine,
    sweep_journals,
)
from dist_tune.errors import CandidateFailure, FailureKind, Failures, NoValidConfigError, StuckDeviceError
from dist_tune.search import ReducedTimes, Replay, Samples, Trial
from dist_tune.sites.earlier import MAX_STRIKES, Offer, Past, past_of
from dist_tune.sites.site import Site, is_fatal

_FIRST_RUN = -1
"""In place of a replay's number, for a launch in a run without a schedule."""
_owners: dict[Path, object] = {}
"""Journals that this process has left -> kernel or function of the first site."""


class TuningJournal:
    """The journal of one tuning; nothing is read or written without a cache, or before a site without a record is met."""

    def __init__(self, closure: str, rank: int, n_ranks: int, lookup: CacheLookup) -> None:
        self._identity, self._rank = [closure, str(rank), str(n_ranks), str(os.getuid())], rank
        self._lookup = lookup
        self._file: JournalFile[JournalLine] | None = None
        self._past = Past()
        self._is_launching = False
        self._barred: Failures = {}
        self._agreed: Offer = {}
        self._has_run: set[tuple[str, int]] = set()
        """Known-good ones: they are not under way when they run for a site that has nothing to time."""

    # -- at the entry of a site ----------------------------------------------------------------------------------

    def enter(self, site: Site, owner: object = None) -> None:
        """Open the journal if it is the first site without a record, and note at the site which candidates must not run, or run last.

        ``owner``: the kernel or function. A journal that this process has left for another one is of another step of the same name.
        """
        place = self._lookup.place_of(site.label)
        if place is None or self._lookup.is_required:
            return
        folder, key = place
        if self._file is None:
            journal = folder / JOURNALS / f"{digest([*self._identity, key])}{LINES_SUFFIX}"
            sweep_journals(journal.parent)
            self._file = JournalFile(journal, JournalLine, self._lookup.rights)
            if _owners.setdefault(journal, owner) is not owner:
                self._file.begin_anew()
                _owners[journal] = owner
            self._past = past_of(self._file.lines)
            self._append("open")
        self._append("site", label=site.label, key=key)
        path = folder / QUARANTINE / f"{key}{LINES_SUFFIX}"
        barred = self._barred[site.label] = {}
        if self._past.keys.get(site.label, key) != key:
            self._past.forget(site.label)
        elif site.label in self._past.keys:
            barred |= {i: each for i, each in self._past.failures.get(site.label, {}).items() if i < len(site.configs)}
            site.suspects |= {i for label, i in self._past.suspects if label == site.label and i < len(site.configs)}
            for i in sorted(i for i in site.suspects if self._past.strikes[site.label, i] >= MAX_STRIKES):
                config = QuarantinedConfig(kernel=site.kernel, key=site.key, config=site.texts[i], rank=self._rank, since=time.time())
                quarantine(path, config, self._lookup.rights)
                self._append("quarantined", label=site.label, n=[i])
        known = {each.config: each for each in read_quarantine(path)}
        for i, text in enumerate(site.texts):
            if text in known:
                reason = (
                    f"quarantined, because the process of rank {known[text].rank} ended while it ran alone, or twice; "
                    f"dist-tune cache clear --quarantine lets it run again"
                )
                barred[i] = CandidateFailure(FailureKind.QUARANTINED, reason)
        site.failures.update(barred)
        site.suspects |= barred.keys()

    # -- around runs ---------------------------------------------------------------------------------------------

    def launching(self, on: Mapping[str, int]) -> None:
        """Before a launch in a run without a schedule, as the first run is; ``on``: site -> candidate, empty in other runs."""
        self._is_launching = bool(on)
        if on:
            self._append("begun", n=[_FIRST_RUN], on=on)

    def launched(self) -> None:
        """After it."""
        if self._is_launching:
            self._is_launching = False
            self._append("ran", n=[_FIRST_RUN])

    def begin(self, replay: int, schedule: Replay, *, is_alone: bool = False) -> None:
        """Before a replay. ``is_alone``: all but one of its candidates are known to run."""
        if not self._is_open:
            return
        pairs = {label: trial.candidate for label, trial in schedule.items()}
        doubtful = {label: i for label, i in pairs.items() if schedule[label].is_timed or (label, i) not in self._has_run}
        if doubtful:
            self._append("begun", n=[replay], on=doubtful, is_alone=is_alone and len(doubtful) == 1)

    def end(self, replay: int, schedule: Replay, ms: float, samples: Samples, *, is_final: bool) -> None:
        """When the device is through with a replay whose launches are among the samples."""
        if not self._is_open:
            return
        on = {label: trial.candidate for label, trial in schedule.items()}
        self._has_run |= on.items()
        launches_ms = samples.launches_of(replay, schedule)
        timed = [label for label, trial in schedule.items() if trial.is_timed and (is_final or label in launches_ms)]
        is_sound = all(isfinite(each) and each > 0 for each in (ms, *chain.from_iterable(launches_ms.values())))
        if not timed or samples.is_disturbed(replay) or not is_sound:
            self._append("ran", n=[replay])
            return
        self._append("measured", n=[replay], on=on, timed=timed, ms=ms, launches_ms=launches_ms, is_final=is_final)

    def struck(self, replays: Iterable[int]) -> None:
        """After a meeting: these replays count on no rank."""
        if replays := sorted(replays):
            self._append("struck", n=replays)

    def agreed(self, times: Mapping[str, Mapping[int, ReducedTimes]]) -> None:
        """After a meeting."""
        if times:
            self._append("agreed", agreed_ms={label: {i: t.kernel_ms for i, t in each.items()} for label, each in times.items()})

    def dropped(self, failures: Failures) -> None:
        """Note what failed here."""
        for label, each in failures.items():
            for i, (kind, reason) in each.items():
                if kind is not FailureKind.QUARANTINED:
                    self._append("dropped", label=label, n=[i], kind=str(kind), reason=reason)

    def suspected(self, label: str, candidates: Sequence[int]) -> None:
        """Note what was under way on some rank when its process died: a death counts on all ranks, as the next one may come to another."""
        if candidates:
            self._append("suspected", label=label, n=list(candidates))

    def begin_phase(self, name: str) -> None:
        """Note that a phase begins, and the one before has ended."""
        self._append("phase", label=name)

    # -- going on ------------------------------------------------------------------------------------------------

    def offer(self, labels: Iterable[str]) -> Offer:
        """The samples of these sites that this rank can go on from."""
        wanted = {label for label in labels if (place := self._lookup.place_of(label)) and self._past.keys.get(label) == place[1]}
        found: Offer = {}
        for (label, i, is_final), lines in self._past.samples.items():
            if label in wanted and (label, i) not in self._past.suspects and i not in self._past.failures.get(label, {}):
                found.setdefault(label, {}).setdefault(i, [0, 0])[is_final] = len(lines)
        return found

    def barred(self, labels: Iterable[str]) -> Failures:
        """Candidates of these sites that are known not to run on this rank: by an earlier attempt, or because they are in quarantine."""
        return {label: each for label in labels if (each := self._barred.get(label))}

    def adopt(self, agreed: Offer) -> int:
        """Go on from the samples that all ranks have; returns their number. The same on all ranks."""
        self._agreed |= agreed
        return sum(n for each in agreed.values() for counts in each.values() for n in counts)

    def begin_anew(self, label: str) -> None:
        """Leave the samples that are left of a site, which may be of its first race: it races again beside another config of a function."""
        self._agreed.pop(label, None)

    def serve(self, batch: Sequence[Replay], samples: Samples, *, is_final: bool) -> list[Replay]:
        """The replays of a batch that are yet to be run, fewer where samples of earlier attempts take the place of their trials.

        The same on all ranks: trials that are left move up within their site, with a known-good candidate where a site has none left.
        """
        left: dict[str, list[Trial]] = {}
        served: dict[str, int] = {}
        for replay in batch:
            for label, trial in replay.items():
                if not trial.is_timed:
                    continue
                if self._take(label, trial.candidate, is_final, samples):
                    served[label] = trial.candidate
                else:
                    left.setdefault(label, []).append(trial)
        if not served or not left:
            return [] if served else list(batch)
        n_first = next(k for k, replay in enumerate(batch) if any(trial.is_timed for trial in replay.values()))
        idle = {label: Trial(trial.candidate, is_timed=False) for replay in batch for label, trial in replay.items() if not trial.is_timed}
        idle |= {label: Trial(i, is_timed=False) for label, i in served.items()}
        rest = [idle | {label: trials[k] for label, trials in left.items() if k < len(trials)} for k in range(max(map(len, left.values())))]
        return [*batch[:n_first], *rest]

    # -- the end -------------------------------------------------------------------------------------------------

    def end_with(self, error: BaseException) -> None:
        """Keep it for another attempt after an error; delete it where the tuning has come to its end, and no config runs."""
        if isinstance(error, NoValidConfigError):
            self.close(delete=True)
            return
        if not is_fatal(error) and not isinstance(error, StuckDeviceError):  # those come late: what is under way may be the cause
            self._append("stop")
        self.close()

    def close(self, *, delete: bool = False) -> None:
        """Leave it as after a death of the process, or ``delete`` it, because no later attempt is to go on from it."""
        if self._file is not None:
            self._file.close(delete=delete)
            if delete:
                _owners.pop(self._file.path, None)

    def _take(self, label: str, candidate: int, is_final: bool, samples: Samples) -> bool:
        """Use up one sample that all ranks have; where this rank has met the site it is added to its samples."""
        counts = self._agreed.get(label, {}).get(candidate, [0, 0])
        if counts[is_final] == 0:
            return False
        counts[is_final] -= 1
        self._has_run.add((label, candidate))
        if lines := self._past.samples.get((label, candidate, is_final)):
            line = lines.pop(0)
            schedule = {site: Trial(i, is_timed=site == label) for site, i in line.on.items()}
            samples.add_earlier(label, candidate, line.ms or 0.0, line.launches_ms.get(label, []), schedule)
        return True

    @property
    def _is_open(self) -> bool:
        return self._file is not None and self._file.is_open

    def _append(self, event: str, **values: Any) -> None:
        if self._file is not None:
            self._file.append({"t": event, **values})
