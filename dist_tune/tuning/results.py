"""The end of a tuning: the record of each site, and the lines about it in the log and on the first rank's terminal.

What is said of records is said by ``dist_tune.cache.account``, so that the report and ``dist-tune show`` tell the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dist_tune.cache import CandidateRecord, Environment, TuningRecord, account
from dist_tune.configs import config_fields
from dist_tune.output import amount, site_name, site_names, table
from dist_tune.search import CandidateResult
from dist_tune.sites import Site
from dist_tune.tuning.context import TuningContext

_MAX_BLOCKS = 5
"""Sites that the terminal tells of."""


def make_record(context: TuningContext, label: str, where: Environment) -> TuningRecord:
    """The record of one site; a rank that never met the site knows only what the others reported."""
    site, race = context.sites.met.get(label), context.race
    texts, results = context.entries[label].texts, race[label].results()
    winner, selection = race[label].best, race[label].selection
    assert winner is not None
    return TuningRecord(
        closure=context.name,
        kernel=site.kernel if site is not None else label.partition("[")[0],
        key=site.key if site is not None else "[" + label.partition("[")[2].rpartition("]")[0] + "]",
        source=site.source if site is not None else "",
        not_followed=site.not_followed if site is not None else [],
        winner=winner,
        reason=race[label].reason,
        candidates=[_candidate(i, text, each, site) for i, (text, each) in enumerate(zip(texts, results, strict=True))],
        n_replays=context.replays.n_replays + 1,  # with the last run, which comes after the record
        n_variants=context.replays.trials.variants.counts.get(label, 1),
        closure_weight=selection.closure_weight if selection else 0.0,
        seconds=context.expenses.seconds.total,
        spent=context.expenses.seconds.model_copy(),  # which go on through the last run
        meeting_seconds=context.expenses.meetings,
        environment=where,
    )


def _candidate(index: int, text: str, result: CandidateResult, site: Site | None) -> CandidateRecord:
    resources = site.resources.get(index) if site is not None else None
    times = result.times
    return CandidateRecord(
        index=index,
        config=text,
        fields=config_fields(site.configs[index]) if site is not None else {},
        latency_ms=times.kernel_ms if times else None,
        spread_ms=times.spread_ms if times else None,
        # The step less what other sites' candidates have added to it, and these are estimates: no step is shorter than its launches.
        closure_ms=max(times.closure_ms, times.launches_ms) if times else None,
        n_replays=times.n_replays if times else 0,
        rank_latencies_ms=times.rank_latencies_ms if times else {},
        failure=result.failure,
        left=result.left,
        equal_to=result.equal_to,
        shared_bytes=resources.shared_bytes if resources else None,
        n_regs=resources.n_regs if resources else None,
        n_spills=resources.n_spills if resources else None,
    )


def table_rows(record: TuningRecord, label: str) -> list[str]:
    """The table of a site: all candidates from fastest to slowest, then those without a time, then the dropped ones, with reasons."""
    shared = account.shared_fields(record)
    title = f"site={label}: {len(record.candidates)} candidates from fastest to slowest"
    title = "; ".join(filter(None, [title, account.weighing(record), shared and f"all with {shared}"]))
    return [title, *(f"  {line}" for line in table(account.candidate_rows(record, has_ranks=True)))]


@dataclass(frozen=True, slots=True)
class Settled:
    """A site with its config."""

    number: int
    record: TuningRecord
    record_id: str = ""
    """As ``dist-tune show`` takes it; empty where no record is kept."""


def blocks(sites: Sequence[Settled], log: Path | None = None) -> list[list[str]]:
    """Two or three lines about each site, with names of which no two are alike. ``log``: where there is more to read, if it is kept."""
    named = [(each.record.kernel, each.record.key) for each in sites]
    names = site_names(named, [f"{site_name(*name)} (site {each.number} of the log)" for name, each in zip(named, sites, strict=True)])
    return [_block(site, name, log) for site, name in zip(sites, names, strict=True)]


def _block(site: Settled, name: str, log: Path | None) -> list[str]:
    record, drag = site.record, account.slowest_rank(site.record)
    spent = f"{record.seconds:.1f} s" + f", slowest {drag}" * bool(drag)
    lines = [f"{name}  {account.headline(record)}", f"  {account.short_config(record.best)}   {account.fates(record)}   {spent}"]
    further = [f"why: dist-tune show {site.record_id}"] * bool(site.record_id) + [f"log: {log}"] * (log is not None)
    return [*lines, f"  {'   '.join(further)}"] if further else lines


def summary(name: str, sites: Sequence[Settled]) -> list[str]:
    """The last lines of a tuning in the log: a block for each site, with its number."""
    lines = [f"summary of {name}: {amount(len(sites), 'site')}"]
    for site, (head, *others) in zip(sites, blocks(sites), strict=True):
        lines += [f"  site {site.number} winner={site.record.winner} {head}", *(f"  {line}" for line in others)]
    return lines


def page(sites: Sequence[Settled], log: Path | None) -> list[str]:
    """The last lines of a tuning on the terminal: the blocks of the sites that take longest, and how many there are besides."""
    slowest = sorted(zip(sites, blocks(sites, log), strict=True), key=lambda each: -(each[0].record.best.latency_ms or 0.0))
    lines = [line for _, block in slowest[:_MAX_BLOCKS] for line in block]
    n_more = len(sites) - _MAX_BLOCKS
    return [*lines, f"and {amount(n_more, 'site')} more: dist-tune report has all"] if n_more > 0 else lines
