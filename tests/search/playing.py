"""Ranks that play what a search asks for, with plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median

from dist_tune.errors import CandidateFailure, FailureKind, reasons
from dist_tune.search import (
    Guide,
    Plan,
    PriorTimes,
    Race,
    Replay,
    Report,
    Times,
    Trial,
    reduce_reports,
)

Take = Callable[[int, str, int, int], "float | str | None"]
"""(rank, site, candidate, replay) -> milliseconds, why it failed, or None where the site was not
met.
"""


class World:
    """Ranks that replay what a search asks for and report medians of what ``take`` says, for the
    kernel and the closure.

    ``began_s``: seconds when the search begins; None: no clock. ``compile_s``: of each candidate of
    a wave, of which ``broken`` ones fail.
    """

    def __init__(
        self,
        search: Race,
        n_ranks: int,
        take: Take,
        began_s: float | None = None,
        compile_s: float = 0.0,
        broken: Mapping[int, str] = {},
    ) -> None:
        self.search, self.n_ranks, self.take = search, n_ranks, take
        self.elapsed_s, self._has_clock, self._compile_s, self._broken = (
            began_s or 0.0,
            began_s is not None,
            compile_s,
            broken,
        )
        self.replays: list[Replay] = []
        self.waves: list[list[int]] = []
        self.samples: dict[str, dict[int, dict[int, list[float]]]] = {}
        """Site -> rank -> candidate -> times."""
        self.failures: dict[str, dict[int, dict[int, CandidateFailure]]] = {}

    def batch(self) -> int:
        """Replay one batch and tell the search; returns how many replays that was."""
        while waves := self.search.waves():
            for site, wave in waves.items():
                self.waves.append(wave)
                self.elapsed_s += self._compile_s * len(wave)
                self.search[site].drop({i: why for i, why in self._broken.items() if i in wave})
            self.search.join(waves)
        batch, began_s = self.search.batch(), self.elapsed_s
        for replay in batch:
            self.replays.append(replay)
            runs_ms = [self._run(rank, replay) for rank in range(self.n_ranks)]
            self.elapsed_s += max(runs_ms) / 1e3
        report = self.reduced(self.elapsed_s - began_s)
        for site, failures in report.failures.items():  # as each meeting does
            self.search[site].drop(reasons(failures))
        self.search.tell(len(batch), report)
        return len(batch)

    def finish(self, at_most: int = 10_000) -> World:
        """Replay until the search asks for nothing more."""
        while self.batch():
            assert len(self.replays) <= at_most, f"no end after {at_most} replays"
        return self

    def trials(self, site: str = "s") -> list[Trial | None]:
        return [replay.get(site) for replay in self.replays]

    def timed(self, site: str = "s") -> Counter[int]:
        """Candidate -> replays that time it."""
        return Counter(
            trial.candidate for trial in self.trials(site) if trial is not None and trial.is_timed
        )

    def reduced(self, batch_s: float = 0.0) -> Report:
        seconds = (self.elapsed_s, batch_s) if self._has_clock else (0.0, 0.0)
        return reduce_reports({rank: self._report(rank, *seconds) for rank in range(self.n_ranks)})

    def _report(self, rank: int, elapsed_s: float, batch_s: float) -> Report:
        measured = {
            site: {
                i: Times(median(each), median(each) + 1.0, n_replays=len(each))
                for i, each in ranks[rank].items()
            }
            for site, ranks in self.samples.items()
            if rank in ranks
        }
        failures = {
            site: dict(ranks[rank]) for site, ranks in self.failures.items() if rank in ranks
        }
        return Report(measured, failures, elapsed_s=elapsed_s, batch_s=batch_s)

    def _run(self, rank: int, replay: Replay) -> float:
        total_ms = 0.0
        for site, trial in replay.items():
            ms = self.take(rank, site, trial.candidate, len(self.replays) - 1)
            if isinstance(ms, str):
                self.failures.setdefault(site, {}).setdefault(rank, {})[trial.candidate] = (
                    CandidateFailure(FailureKind.LAUNCH, ms)
                )
            elif ms is not None:
                total_ms += ms
                if trial.is_timed:
                    self.samples.setdefault(site, {}).setdefault(rank, {}).setdefault(
                        trial.candidate, []
                    ).append(ms)
        return total_ms


def searching(
    plan: Plan, sites: Mapping[str, int], failures: Mapping[str, Mapping[int, str]] | None = None
) -> Race:
    search = Race(plan)
    for site, n_candidates in sites.items():
        search.add(site, n_candidates, (failures or {}).get(site, {}))
    return search


def entered(
    n: int,
    plan: Plan | None = None,
    *,
    failures: Mapping[int, str] = {},
    prior: PriorTimes | None = None,
    equal: Mapping[int, int] = {},
    guide: Guide | None = None,
) -> Race:
    """A race of one site of ``n`` candidates, after its first vote."""
    search = Race(plan or Plan())
    untried = guide.untried if guide is not None else ()
    search.add(
        "s", n, {i: why for i, why in failures.items() if i not in untried}, prior, equal, guide
    )
    return search
