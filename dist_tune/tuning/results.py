"""The end of a tuning: the record of each site, its table and the summary in the log, and blocks for the first rank's terminal.

What is said of records is said by ``dist_tune.cache``, so that the report and ``dist-tune show`` tell the same.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path

from dist_tune.cache import (
    CandidateRecord,
    Environment,
    Seconds,
    TuningRecord,
    candidate_rows,
    fates,
    gain,
    gain_told,
    lead,
    parts_of,
    shared_fields,
    short_config,
    skew,
    slowest_rank,
    weighing,
)
from dist_tune.configs import config_fields
from dist_tune.output import amount, lead_words, milliseconds, printable, shortened, site_name, site_names, table
from dist_tune.search import CandidateResult
from dist_tune.sites import Site
from dist_tune.tuning.context import TuningContext

MAX_BLOCKS = 5
"""Sites with a block each on the terminal; of more there is one table."""
_MAX_ROWS = 10
_MIN_WIDE = 80
"""Columns of a terminal from which a table names configs."""


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
    shared = shared_fields(record)
    title = f"site={label}: {len(record.candidates)} candidates from fastest to slowest"
    title = "; ".join(filter(None, [title, weighing(record), shared and f"all with {shared}"]))
    return [title, *(f"  {line}" for line in table(candidate_rows(record, has_ranks=True)))]


@dataclass(frozen=True, slots=True)
class Settled:
    """A site with its config."""

    number: int
    record: TuningRecord
    record_id: str = ""
    """As ``dist-tune show`` takes it; empty where no record is kept."""

    @property
    def name(self) -> str:
        """Kernel and values of its key; another site of the tuning may have the same."""
        return site_name(self.record.kernel, self.record.key)


def headline(record: TuningRecord) -> str:
    """Time of the winner, gain over the first config, lead over the next, and the reason of the choice."""
    best_ms, ahead, ratio = record.best.latency_ms, lead(record), gain(record)
    is_slower = ratio is not None and f"{ratio:.2f}" < "1.00" and record.reason == "fastest step"
    told = [
        f"{milliseconds(best_ms)} ms" if best_ms is not None else "not timed",
        gain_told(record),
        lead_words(ahead[0]) if ahead is not None else "",
        "chosen because the step is faster" if is_slower else record.reason,
    ]
    return ", ".join(filter(None, told))


def names_of(sites: Sequence[Settled]) -> list[str]:
    """Their names, no two alike."""
    return site_names(
        [(each.record.kernel, each.record.key) for each in sites], [f"{each.name} (site {each.number} of the log)" for each in sites]
    )


def block(site: Settled, log: Path | None, name: str = "") -> list[str]:
    """Two or three lines about one site, as the terminal shows them. ``name``: where its own is another site's, too."""
    record = site.record
    drag = slowest_rank(record)
    spent = f"{record.seconds:.1f} s" + f", slowest {drag}" * bool(drag)
    lines = [f"{name or site.name}  {headline(record)}", f"  {short_config(record.best)}   {fates(record).text}   {spent}"]
    further = _further(site.record_id or "", log)
    return [*lines, f"  {further}"] if further else lines


def _further(record_id: str, log: Path | None) -> str:
    """Where there is more to read: the record and the log, as far as they are kept."""
    return "   ".join([f"why: dist-tune show {record_id}"] * bool(record_id) + [f"log: {log}"] * (log is not None))


def page(sites: Sequence[Settled], log: Path | None, width: int, *, is_live: bool) -> list[str]:
    """Blocks, or a table of the sites with the largest share of the step. ``is_live``: for a terminal, with rows of at most ``width``."""
    named = list(zip(sites, names_of(sites), strict=True))
    lines: list[str] = []
    for site, name in named if len(sites) <= MAX_BLOCKS else ():
        texts = [printable(line) for line in block(site, log, name)]
        rows = [row for line in texts for row in (textwrap.wrap(line, width, break_on_hyphens=False) if is_live else [line])]
        n_bold = len(printable(name)) if is_live else 0
        lines += [f"\x1b[1m{rows[0][:n_bold]}\x1b[0m{rows[0][n_bold:]}" if n_bold else rows[0], *rows[1:]]
    if lines:
        return lines
    more = f"and {len(sites) - _MAX_ROWS} more   " if len(sites) > _MAX_ROWS else ""
    further = _further("ID" * any(site.record_id for site in sites), log)
    end = f"{more}{sites[0].record.seconds:.1f} s   {further}".rstrip()
    return [*_table(named, width), *(textwrap.wrap(end, width, break_on_hyphens=False) if is_live else [end])]


def _table(named: Sequence[tuple[Settled, str]], width: int) -> list[str]:
    """The sites with the largest share of the step; on a narrow terminal without configs and ids."""
    is_wide = width >= _MIN_WIDE
    rows = list[dict[str, str]]()
    for site, name in sorted(named, key=lambda each: (-(each[0].record.best.latency_ms or 0.0), each[0].number))[:_MAX_ROWS]:
        best, ratio = site.record.best, gain(site.record)
        share = 100 * min(1.0, best.latency_ms / best.closure_ms) if best.latency_ms and best.closure_ms else None
        row = {"kernel": printable(name), "ms": milliseconds(best.latency_ms) if best.latency_ms is not None else ""}
        row |= {"gain": f"{ratio:.2f}x" if ratio else "", "step": f"{share:.0f} %" if share is not None else ""}
        rows.append(row | ({"show": site.record_id, "config": printable(short_config(best))} if is_wide else {}))
    # Kernel and config share what numbers and ids leave.
    longest = {name: max(len(row[name]) for row in rows) for name in ("kernel", "config") if name in rows[0]}
    numbers = table([{name: cell for name, cell in row.items() if name not in longest} for row in rows])
    rest = width - max(map(len, numbers), default=0) - 2 * len(longest)
    if is_wide:
        longest["config"] = max(6, min(longest["config"], max(rest - longest["kernel"], rest // 2)))
        rest -= longest["config"]
    longest["kernel"] = max(6, min(longest["kernel"], rest))
    return table([row | {name: shortened(row[name], n_chars) for name, n_chars in longest.items()} for row in rows])


def summary(name: str, sites: Sequence[Settled], seconds: Seconds, meetings: Mapping[str, tuple[int, float]]) -> list[str]:
    """The last lines of a tuning in the log. ``meetings``: topic -> number and seconds."""
    lines = [f"summary of {name}: {amount(len(sites), 'site')} in {seconds.total:.2f} s"]
    causes: Counter[str] = Counter()
    drags: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for site in sites:
        lines.append(f"  site {site.number} winner={site.record.winner} {headline(site.record)}")
        lines.append(f"    {short_config(site.record.best)}")
        fate = fates(site.record)
        lines.append(f"    {fate.text}" + f"; dist-tune show {site.record_id}" * bool(site.record_id))
        causes += fate.failures
        if (found := skew(site.record)) is not None:
            drags[found[0]].append((found[1], site.number))
    if causes:
        lines.append("  dropped: " + ", ".join(f"{n} {cause}" for cause, n in causes.most_common()))
    for rank, found_at in sorted(drags.items(), key=lambda each: -len(each[1])):
        numbers = ", ".join(str(number) for _, number in sorted(found_at, key=lambda each: each[1]))
        where = f"site{'s' * (len(found_at) > 1)} {numbers}"
        lines.append(f"  slowest rank {rank}: at {where}, by up to {100 * max(found_at)[0]:.1f} % over the fastest rank")
    return [*lines, *_times(seconds, meetings)]


def _times(seconds: Seconds, meetings: Mapping[str, tuple[int, float]]) -> list[str]:
    # Rounded down, so that the parts are no longer than the whole.
    parts = {name: _floor(each) for name, each in parts_of(seconds.model_dump()).items() if _floor(each) > 0}
    lines = [f"  {seconds.total:.2f} s" + f" = {' + '.join(f'{name} {each:.2f}' for name, each in parts.items())}" * bool(parts)]
    if meetings:
        each = ", ".join(f"{n} x {topic} {s:.3f} s" for topic, (n, s) in sorted(meetings.items(), key=lambda one: -one[1][1]))
        n_all = sum(n for n, _ in meetings.values())
        lines.append(
            f"  of these {_floor(seconds.meetings):.2f} s in {amount(n_all, 'meeting')}, the wait for the last rank included: {each}"
        )
    if seconds.compile_cpu:
        lines.append(f"  compilation: {seconds.compile_cpu:.2f} CPU-seconds over all threads of this rank, beside the above")
    return lines


def _floor(seconds: float) -> float:
    return floor(100 * seconds) / 100
