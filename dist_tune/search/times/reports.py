"""One rank's report of a batch of replays, and the reduction of all reports to numbers that are equal on all ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from dist_tune.errors import CandidateFailure, FailureKind, Failures
from dist_tune.measure import median
from dist_tune.search.selection import ReducedTimes

MAX_RANKS_LISTED = 16
"""Larger groups list only the slowest and the fastest rank of a candidate, so that messages do not grow with the group."""


class LocalTimes(NamedTuple):
    """One rank's times of one candidate, over all its timed and undisturbed replays so far. Milliseconds. A JSON array."""

    kernel_ms: float
    """Median of the launches."""
    closure_ms: float
    """Median of the replays, less the time that other sites' candidates added to them."""
    spread_ms: float = 0.0
    """MAD of the launches."""
    rest_spread_ms: float = 0.0
    """MAD of the replays less this site's launches."""
    n_replays: int = 1
    n_launches: int = 1
    """Launches a replay."""
    n_timed: int = 1
    """Replays in which launches were timed."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One rank's report of a batch of replays."""

    measured: dict[str, dict[int, LocalTimes]] = field(default_factory=dict)
    """Site -> candidates of the batch -> times. A rank that does not own a site leaves it out: the neutral element."""
    failures: Failures = field(default_factory=dict)
    """On this rank; each is reported once."""
    disturbed: list[int] = field(default_factory=list)
    """Replays in which another config stood in for one that failed, or a new site was compiled and loaded."""
    has_new_sites: bool = False
    """True if this rank met sites that it has not reported."""
    elapsed_s: float = 0.0
    """Seconds of the search on this rank."""
    batch_s: float = 0.0
    """Seconds of the batch on this rank."""
    lost: list[int] = field(default_factory=list)
    """Disturbed replays that are to be run again, because a kernel was not compiled before."""
    has_new_variants: bool = False
    """True if this rank met variants of sites that are to be compiled."""
    nesting: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Site -> function around it -> candidates of the function that launch the site, as this rank has seen it."""


@dataclass(frozen=True, slots=True)
class ReducedReport:
    """The reports of all ranks, reduced. Equal on all of them."""

    times: dict[str, dict[int, ReducedTimes]] = field(default_factory=dict)
    """Site -> candidate -> times since the beginning, for candidates of the batch that all its ranks have measured."""
    failures: Failures = field(default_factory=dict)
    """Each of the first rank on which the candidate failed, with the rank in the reason."""
    disturbed: list[int] = field(default_factory=list)
    has_new_sites: bool = False
    elapsed_s: float = 0.0
    """On the rank with the most."""
    batch_s: float = 0.0
    """On the slowest rank."""
    lost: list[int] = field(default_factory=list)
    has_new_variants: bool = False
    nesting: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """As any rank has seen it."""


def reduce_reports(reports: Mapping[int, BatchReport]) -> ReducedReport:
    """Reduce the reports of all ranks: rank -> report. One function of all reports, so that all ranks can use one rank's result."""
    failures: Failures = {}
    for rank, report in reports.items():
        for site, candidates in report.failures.items():
            for candidate, (kind, reason) in candidates.items():
                failures.setdefault(site, {}).setdefault(candidate, CandidateFailure(kind, f"rank {rank}: {reason}"))
    by_site: dict[str, dict[int, dict[int, LocalTimes]]] = {}
    for rank, report in reports.items():
        for site, measured in report.measured.items():
            by_site.setdefault(site, {})[rank] = measured
            for candidate, each in measured.items():
                if not (isfinite(each.kernel_ms) and each.kernel_ms > 0 and isfinite(each.closure_ms)):
                    failure = CandidateFailure(FailureKind.CLOCK, f"rank {rank}: the clock gave {each.kernel_ms} ms")
                    failures.setdefault(site, {}).setdefault(candidate, failure)
    times = {
        # Measured by all who own the site, or not at all: a MAX over some ranks may hide the slowest.
        site: {i: _reduce({r: measured[i] for r, measured in ranks.items()}) for i in sorted(set.intersection(*map(set, ranks.values())))}
        for site, ranks in by_site.items()
    }
    disturbed = sorted({replay for report in reports.values() for replay in report.disturbed})
    lost = sorted({replay for report in reports.values() for replay in report.lost})
    has_new_sites = any(report.has_new_sites for report in reports.values())
    has_new_variants = any(report.has_new_variants for report in reports.values())
    elapsed_s, batch_s = (max(each) for each in zip(*((report.elapsed_s, report.batch_s) for report in reports.values()), strict=True))
    nesting: dict[str, dict[str, list[int]]] = {}
    for report in reports.values():
        for site, functions in report.nesting.items():
            for function, launching in functions.items():
                seen = nesting.setdefault(site, {}).get(function, [])
                nesting[site][function] = sorted({*seen, *launching})
    return ReducedReport(
        times, failures, disturbed, has_new_sites, elapsed_s, batch_s=batch_s, lost=lost, has_new_variants=has_new_variants, nesting=nesting
    )


def _reduce(by_rank: Mapping[int, LocalTimes]) -> ReducedTimes:
    latencies_ms = {rank: each.kernel_ms for rank, each in by_rank.items()}
    slowest, fastest = max(latencies_ms, key=latencies_ms.__getitem__), min(latencies_ms, key=latencies_ms.__getitem__)
    last = max(by_rank.values(), key=lambda each: each.closure_ms)
    return ReducedTimes(
        kernel_ms=by_rank[slowest].kernel_ms,
        closure_ms=last.closure_ms,
        spread_ms=by_rank[slowest].spread_ms,
        rest_spread_ms=last.rest_spread_ms,
        n_replays=min(each.n_replays for each in by_rank.values()),
        n_launches=by_rank[slowest].n_launches,
        n_timed=min(each.n_timed for each in by_rank.values()),
        n_owners=len(by_rank),
        typical_ms=median(list(latencies_ms.values())),
        rank_latencies_ms={r: ms for r, ms in latencies_ms.items() if len(by_rank) <= MAX_RANKS_LISTED or r in (slowest, fastest)},
    )
