"""The record of a tuned site, and its table in the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dist_tune.cache import (
    CandidateRecord,
    Environment,
    TuningRecord,
    differing,
    from_fastest,
    shared_fields,
    short_config,
    weighing,
    why_not,
)
from dist_tune.configs import config_fields
from dist_tune.search import CandidateResult
from dist_tune.sites import Site
from dist_tune.tuning.context import TuningContext

if TYPE_CHECKING:
    from dist_tune.output import Logger

_WIDE = 108
"""Characters of a row without the reason, from which headings stand in two rows: with time and level that is a line of 130."""
_MAX_FIELDS = 12
"""Fields of a config with a column each; with more differing ones there is one column of whole configs."""


def make_record(context: TuningContext, label: str, where: Environment) -> TuningRecord:
    """The record of one site; a rank that never met the site knows only what the others reported."""
    site, race = context.sites.met.get(label), context.race
    texts, results = context.entries[label].texts, race.results(label)
    winner, selection = race.best(label), race.selection(label)
    assert winner is not None
    return TuningRecord(
        closure=context.name,
        kernel=site.kernel if site is not None else label.partition("[")[0],
        key=site.key if site is not None else "[" + label.partition("[")[2].rpartition("]")[0] + "]",
        source=site.source if site is not None else "",
        not_followed=site.not_followed if site is not None else [],
        winner=winner,
        reason=race.reason(label),
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


def log_table(log: Logger, record: TuningRecord, label: str) -> None:
    """All candidates from fastest to slowest, then those without a time, then the dropped ones, each with the reason why it is out."""
    for row in table_rows(record, label):
        log.info(row)


def table_rows(record: TuningRecord, label: str) -> list[str]:
    """The table of a site, aligned; columns that would be empty and fields that all candidates share have none."""
    ordered = from_fastest(record)
    names = differing(ordered)
    names = names if len(names) <= _MAX_FIELDS else []
    ranks = sorted({rank for each in ordered for rank in each.rank_latencies_ms})
    rows = [_cells(each, record, names, ranks) for each in ordered]
    columns = {name: column for name in rows[0] if any(column := [row[name] for row in rows])}
    widest = {name: max(map(len, column)) for name, column in columns.items()}
    shared = shared_fields(record) if names else ""
    title = f"site={label}: {len(ordered)} candidates from fastest to slowest, times in ms"
    title = "; ".join(filter(None, [title, weighing(record), shared and f"all with {shared}"]))
    heads: dict[str, tuple[str, ...]] = {name: (name,) for name in columns}
    gap = "  "
    if sum(max(len(name), width) + 2 for name, width in widest.items() if name) > _WIDE:
        # Else the reason of each candidate would stand in a row of its own.
        heads, gap = {name: _stacked(name) for name in columns}, " "
    aligned = []
    for name, column in columns.items():  # by columns: a table of 200 rows by cells takes a hundredth of a tuning
        align, width = str.ljust if name in ("config", "") else str.rjust, max(*map(len, heads[name]), widest[name])
        aligned.append([align(cell, width) for cell in (*heads[name], *column)])
    return [title, *(f"  {gap.join(row)}".rstrip() for row in zip(*aligned, strict=True))]


def _stacked(name: str) -> tuple[str, ...]:
    """A heading in two rows, broken after its last underscore: "SPLIT_", "STORE"."""
    first, mark, last = name.rpartition("_")
    return first + mark, last


def _cells(each: CandidateRecord, record: TuningRecord, names: Sequence[str], ranks: Sequence[int]) -> dict[str, str]:
    """Column -> cell. The last one, without a name, is the reason: it may be long."""
    configs = {name: str(each.fields.get(name, "")) for name in names} or {"config": short_config(each)}
    return {
        "#": str(each.index),
        "kernel": _ms(each.latency_ms),
        "+/-": _ms(each.known_spread_ms),
        "step": _ms(each.closure_ms),
        "replays": str(each.n_replays or ""),
        **({f"rank {rank}": _ms(each.rank_latencies_ms.get(rank)) for rank in ranks} if len(ranks) > 1 else {}),
        **configs,
        "shared": "" if each.shared_bytes is None else str(each.shared_bytes),
        "regs": "" if each.n_regs is None else str(each.n_regs),
        "spills": "" if each.n_spills is None else str(each.n_spills),
        "": f"{'dropped: ' if each.failure is not None else ''}{why_not(each, record)}",
    }


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4f}"
