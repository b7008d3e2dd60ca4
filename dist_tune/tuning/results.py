"""The end of a tuning: the record of each site, and the lines about it in the log and on the first
rank's terminal.

What is said of records is said by ``dist_tune.records.account``, so that the report and ``dist-tune
show`` tell the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dist_tune.configs import config_fields
from dist_tune.log import milliseconds, site_name, site_names, table
from dist_tune.records import CandidateRecord, Environment, TuningRecord, account
from dist_tune.replays import StepTimes
from dist_tune.search import CandidateResult
from dist_tune.sites import Site
from dist_tune.tuning.context import TuningContext

_MAX_LINES = 5
"""Sites that the terminal tells of."""


def make_record(context: TuningContext, label: str, where: Environment) -> TuningRecord:
    """The record of one site; a rank that never met the site knows only what the others
    reported.
    """
    site, race = context.sites.met.get(label), context.race
    texts, results = context.entries[label].texts, race[label].results()
    winner, selection = race[label].best, race[label].selection
    assert winner is not None
    is_by_graphs = context.replays.in_graphs and race[label].reason == "fastest step"
    return TuningRecord(
        closure=context.name,
        kernel=site.kernel if site is not None else label.partition("[")[0],
        key=(
            site.key if site is not None else "[" + label.partition("[")[2].rpartition("]")[0] + "]"
        ),
        source=site.source if site is not None else "",
        winner=winner,
        reason=f"{race[label].reason} as a CUDA graph" if is_by_graphs else race[label].reason,
        candidates=[
            _candidate(i, text, each, site)
            for i, (text, each) in enumerate(zip(texts, results, strict=True))
        ],
        n_replays=context.replays.n_replays + 1,  # with the last run, which comes after the record
        n_variants=context.replays.trials.variants.counts.get(label, 1),
        closure_weight=selection.closure_weight if selection else 0.0,
        seconds=context.expenses.seconds.total,
        spent=context.expenses.seconds.model_copy(),  # which go on through the last run
        meeting_seconds=context.expenses.meetings,
        environment=where,
    )


def _candidate(
    index: int, text: str, result: CandidateResult, site: Site | None
) -> CandidateRecord:
    resources = site.resources.get(index) if site is not None else None
    times = result.times
    return CandidateRecord(
        index=index,
        config=text,
        fields=config_fields(site.configs[index]) if site is not None else {},
        latency_ms=times.kernel_ms if times else None,
        spread_ms=times.spread_ms if times else None,
        # The step less what other sites' candidates have added to it, and these are estimates: no
        # step is shorter than its launches.
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


@dataclass(frozen=True, slots=True)
class Settled:
    """A site with its config."""

    number: int
    record: TuningRecord
    record_id: str = ""
    """As ``dist-tune show`` takes it; empty where no record is kept."""


def table_rows(site: Settled) -> list[str]:
    """The table of a site: all candidates from fastest to slowest, then those without a time, then
    the dropped ones, with reasons.
    """
    shared = account.shared_fields(site.record)
    title = [
        (
            f"site {site.number} = {site.record.kernel}{site.record.key}:"
            f" {account.fates(site.record)}; fastest first"
        ),
        account.weighing(site.record),
        f"all with {shared}" if shared else "",
    ]
    return [
        "; ".join(filter(None, title)),
        *(f"  {line}" for line in table(account.candidate_rows(site.record, has_ranks=True))),
    ]


def outcome(
    name: str, records: Sequence[TuningRecord], seconds: float, steps: StepTimes | None = None
) -> str:
    """The step before and after, what the tuning took, and its slowest rank: one line.

    ``steps``: of calls, which tell the slowest rank in place of replays.
    """
    first_ms, best_ms = account.step_times(records)
    after = f"{milliseconds(best_ms)} ms" if best_ms is not None else "not timed"
    if best_ms and first_ms is not None:
        after = f"{milliseconds(first_ms)} -> {after} ({account.faster(first_ms / best_ms)})"
    slowest = account.slowest_rank(records) if steps is None else account.slowest_of(steps.ranks_ms)
    told = f"{name} {after}, tuned in {seconds:.1f} s"
    return f"{told}; slowest {slowest}" if slowest else told


def site_lines(sites: Sequence[Settled], *, has_numbers: bool = False) -> list[str]:
    """A line for each site: name, its launch before and after, config and reason; no two names are
    alike.
    """
    named = [(each.record.kernel, each.record.key) for each in sites]
    names = site_names(
        named,
        [
            f"{site_name(*name)} (site {each.number} of the log)"
            for name, each in zip(named, sites, strict=True)
        ],
    )
    rows = [
        {
            "number": f"site {site.number}" if has_numbers else "",
            "name": name,
            "time": account.before_and_after(site.record),
            "config": account.chosen_fields(site.record),
            "why": account.why_chosen(site.record),
        }
        for site, name in zip(sites, names, strict=True)
    ]
    return [f"  {line}" for line in table(rows, has_header=False)]


def page(sites: Sequence[Settled], *, has_log: bool) -> list[str]:
    """The last lines of a tuning on the terminal: the sites that take longest, how many there are
    besides, and where to read on.
    """
    slowest = sorted(sites, key=lambda each: -(each.record.best.latency_ms or 0.0))
    n_more = len(sites) - _MAX_LINES
    lines = site_lines(slowest[:_MAX_LINES])
    if n_more > 0:
        lines.append(f"  and {n_more} more")
    record_id = next((each.record_id for each in slowest if each.record_id), "")
    further = []
    if record_id:
        further.append(f"why: dist-tune show {record_id}")
    if has_log:
        further.append("report: dist-tune report")
    if further:
        lines.append(f"  {'   '.join(further)}")
    return lines
