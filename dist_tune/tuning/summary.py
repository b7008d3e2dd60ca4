"""The end of a tuning for people: a block for each site on the first rank's terminal, and the summary in each rank's log.

Pure: records and seconds in, lines out.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path

from dist_tune.cache import Seconds, TuningRecord, fates, gain, gain_told, lead, parts_of, short_config, skew, slowest_rank
from dist_tune.output import amount, lead_words, milliseconds, printable, site_name, site_names

MAX_BLOCKS = 5
"""Sites with a block each; of more there is one table."""
_MAX_ROWS = 10
_MIN_WIDE = 80
"""Columns of a terminal from which a table names configs."""
_GAP = 2
"""Spaces between the columns of a table."""


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
    has_ids = width >= _MIN_WIDE and any(site.record_id for site, _ in named)
    columns: dict[str, list[str]] = defaultdict(list)
    for site, name in sorted(named, key=lambda each: (-(each[0].record.best.latency_ms or 0.0), each[0].number))[:_MAX_ROWS]:
        best, ratio = site.record.best, gain(site.record)
        columns["kernel"].append(printable(name))
        columns["ms"].append(milliseconds(best.latency_ms) if best.latency_ms is not None else "-")
        columns["gain"].append(f"{ratio:.2f}x" if ratio else "")
        columns["step"].append(f"{100 * min(1.0, best.latency_ms / best.closure_ms):.0f} %" if best.latency_ms and best.closure_ms else "")
        if has_ids:
            columns["show"].append(site.record_id)
        if width >= _MIN_WIDE:
            columns["config"].append(printable(short_config(best)))
    aligned = []
    for name, n_chars in _widths(columns, width).items():
        align = str.rjust if name in ("ms", "gain", "step") else str.ljust
        cells = [cell if len(cell) <= n_chars else f"{cell[: n_chars - 1]}\N{HORIZONTAL ELLIPSIS}" for cell in (name, *columns[name])]
        aligned.append([align(cell, n_chars) for cell in cells])
    return [(" " * _GAP).join(row).rstrip() for row in zip(*aligned, strict=True)]


def _widths(columns: Mapping[str, Sequence[str]], width: int) -> dict[str, int]:
    """Characters of each column: kernel and config share what numbers and ids leave."""
    widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}
    rest = width - _GAP * (len(widths) - 1) - sum(widths[name] for name in widths if name not in ("kernel", "config"))
    if "config" in widths:
        widths["config"] = max(6, min(widths["config"], max(rest - widths["kernel"], rest // 2)))
        rest -= widths["config"]
    return {**widths, "kernel": max(6, min(widths["kernel"], rest))}


def summary(name: str, sites: Sequence[Settled], seconds: Seconds, meetings: Mapping[str, tuple[int, float]]) -> list[str]:
    """The last lines of a tuning in the log. ``meetings``: topic -> number and seconds."""
    lines = [f"summary of {name}: {amount(len(sites), 'site')} in {seconds.total:.2f} s"]
    causes: Counter[str] = Counter()
    drags: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for site in sites:
        lines.append(f"  site {site.number} winner={site.record.winner} {headline(site.record)}")
        lines.append(f"    {short_config(site.record.best)}")
        lines.append(f"    {fates(site.record).text}{f'; dist-tune show {site.record_id}' if site.record_id else ''}")
        causes += fates(site.record).failures
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
