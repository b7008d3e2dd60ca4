"""Candidates that come to the same kernel on all ranks: one of them races for all.

Each rank compares what its own compilations came to; ranks with other arguments (an integer that is 1 on one of them) may find others
equal, so only those count that every rank of the site has found equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dist_tune.distributed import Reduction
from dist_tune.errors import Failures
from dist_tune.search import BatchReport, reduce_reports
from dist_tune.sites import Site, take_failures

if TYPE_CHECKING:
    from dist_tune.tuning.context import TuningContext

EqualCandidates = Mapping[str, Mapping[int, int]]
"""Site -> candidate -> the one of lower index with the same kernel."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One rank's report of loaded sites."""

    failures: Failures = field(default_factory=dict)
    """Candidates that do not load."""
    first: dict[str, list[int]] = field(default_factory=dict)
    """Site -> for each candidate the first one with the same kernel; empty if all differ. A rank without the site leaves it out."""


@dataclass(frozen=True, slots=True)
class ReducedLoads:
    """The reports of all ranks, reduced."""

    failures: Failures = field(default_factory=dict)
    equal: dict[str, dict[int, int]] = field(default_factory=dict)


@Reduction
def _reduced(reports: Mapping[int, LoadReport]) -> ReducedLoads:
    by_site: dict[str, list[list[int]]] = {}
    for report in reports.values():
        for label, first in report.first.items():
            by_site.setdefault(label, []).append(first)
    equal = {label: found for label, rows in by_site.items() if (found := equal_on_all(rows))}
    return ReducedLoads(reduce_reports({rank: BatchReport(failures=each.failures) for rank, each in reports.items()}).failures, equal)


def equal_on_all(rows: Sequence[Sequence[int]]) -> dict[int, int]:
    """Candidate -> the first one that is equal to it in every row; none if a row is empty."""
    seen: dict[tuple[int, ...], int] = {}
    columns = enumerate(zip(*rows, strict=True)) if all(rows) else ()
    return {i: first for i, column in columns if (first := seen.setdefault(column, i)) != i}


def first_equals(configs: Sequence[Any], kernels: Sequence[str]) -> list[int]:
    """For each candidate the first one with the same kernel and launch; empty if all differ. ``kernels``: digests, empty if unknown.

    Their configs are equal but for ``num_stages``: a grid or another library may read what the kernel's code does not. A config's hook
    is handed all of the config and may do anything with it.
    """
    seen: dict[tuple[str, str], int] = {}
    first = []
    for i, (config, kernel) in enumerate(zip(configs, kernels, strict=True)):
        rest = sorted((name, value) for name, value in config.all_kwargs().items() if name != "num_stages")
        is_comparable = kernel and config.pre_hook is None
        first.append(seen.setdefault((kernel, repr(rest)), i) if is_comparable else i)
    return first if first != list(range(len(first))) else []


def loaded_on_all(context: TuningContext, sites: Sequence[Site]) -> tuple[Failures, EqualCandidates]:
    """Report which candidates load here and which are equal; returns what holds for all ranks. Collective."""
    first = {site.label: _first_equals(context, site) for site in sites}
    reduced = context.reduce("loaded", LoadReport(take_failures(sites), first), _reduced)
    return reduced.failures, reduced.equal


def _first_equals(context: TuningContext, site: Site) -> list[int]:
    kernels = context.compiler.kernels(site.label)
    return first_equals(site.configs, ["" if i in site.failures or i in site.untried else kernel for i, kernel in enumerate(kernels)])
