"""Ranks that play what a search asks for, with plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search import (
    Plan,
    Race,
    Replay,
    Report,
    Times,
    Trial,
    reduce_reports,
)

Take = Callable[[int, str, int, int], "float | str | None"]
"""(rank, site, candidate, replay) -> milliseconds, why it failed, or None where the site was not met."""


class World:
    """Ranks that replay what a search asks for and report medians of what ``take`` says, for the kernel and the closure."""

    def __init__(self, search: Race, n_ranks: int, take: Take) -> None:
        self.search = search
        self.n_ranks = n_ranks
        self.take = take
        self.replays: list[Replay] = []
        self.samples: dict[str, dict[int, dict[int, list[float]]]] = {}
        """Site -> rank -> candidate -> times."""
        self.failures: dict[str, dict[int, dict[int, CandidateFailure]]] = {}

    def batch(self) -> int:
        """Replay one batch and tell the search; returns how many replays that was."""
        batch = self.search.batch()
        for replay in batch:
            self.replays.append(replay)
            for rank in range(self.n_ranks):
                for site, trial in replay.items():
                    self._run(rank, site, trial, len(self.replays) - 1)
        self.search.tell(len(batch), self.reduced())
        return len(batch)

    def finish(self, at_most: int = 10_000) -> World:
        """Replay until the search asks for nothing more."""
        while self.batch():
            assert len(self.replays) <= at_most, f"no end after {at_most} replays"
        return self

    def trials(self, site: str) -> list[Trial | None]:
        return [replay.get(site) for replay in self.replays]

    def reduced(self) -> Report:
        return reduce_reports({rank: self.report(rank) for rank in range(self.n_ranks)})

    def report(self, rank: int) -> Report:
        measured = {
            site: {i: Times(median(each), median(each) + 1.0, n_replays=len(each)) for i, each in ranks[rank].items()}
            for site, ranks in self.samples.items()
            if rank in ranks
        }
        return Report(measured, {site: dict(ranks[rank]) for site, ranks in self.failures.items() if rank in ranks})

    def _run(self, rank: int, site: str, trial: Trial, number: int) -> None:
        ms = self.take(rank, site, trial.candidate, number)
        if isinstance(ms, str):
            self.failures.setdefault(site, {}).setdefault(rank, {})[trial.candidate] = CandidateFailure(FailureKind.LAUNCH, ms)
        elif ms is not None and trial.is_timed:
            self.samples.setdefault(site, {}).setdefault(rank, {}).setdefault(trial.candidate, []).append(ms)


def searching(plan: Plan, sites: Mapping[str, int], failures: Mapping[str, Mapping[int, str]] | None = None) -> Race:
    search = Race(plan)
    for site, n_candidates in sites.items():
        search.add(site, n_candidates, (failures or {}).get(site, {}))
    return search


def table(n_warmup: int, n_repeat: int) -> Plan:
    """Each candidate in turn, as the seed did it."""
    return Plan(n_warmup, n_repeat, search="exhaustive", objective="kernel")


def latencies_ms(search: Race, site: str = "s") -> list[float | None]:
    return [each.times.kernel_ms if each.times else None for each in search[site].results()]


def by_index(rank: int, site: str, candidate: int, replay: int) -> float:
    return 1.0 + candidate


def timed(world: World, site: str = "s") -> list[int]:
    """Candidates in the order in which they were timed."""
    return [trial.candidate for trial in world.trials(site) if trial is not None and trial.is_timed]
