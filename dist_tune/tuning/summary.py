"""The end of a tuning for people: a block for each site on the first rank's terminal, and the summary in each rank's log.

Pure but for the printing: records and seconds in, lines out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING

from dist_tune.cache import (
    Seconds,
    TuningRecord,
    fates,
    gain,
    lead,
    reason,
    short_config,
    short_kernel,
    short_key,
    skew,
)
from dist_tune.output import amount, milliseconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_BLOCKS = 5
"""Sites with a block each; of more there is one table."""
_MAX_ROWS = 10
_MIN_WIDE = 80
"""Columns of a terminal from which a table names configs."""
_PHASES = ("discover", "compile", "race", "finals", "settle")


@dataclass(frozen=True, slots=True)
class Settled:
    """A site with its config."""

    number: int
    record: TuningRecord
    record_id: str = ""
    """As ``dist-tune show`` takes it; empty where no record is kept."""

    @property
    def name(self) -> str:
        """Kernel and key, short."""
        return f"{short_kernel(self.record.kernel)} {short_key(self.record.key)}"


def headline(record: TuningRecord) -> str:
    """Time of the winner, gain over the first config, lead over the next, and the reason of the choice."""
    told = [f"{milliseconds(record.best.latency_ms)} ms" if record.best.latency_ms is not None else "not timed"]
    first = record.candidates[0]
    if (ratio := gain(record)) is not None and record.winner != 0:
        told.append(f"{ratio:.2f}x the first config ({milliseconds(first.latency_ms or 0.0)} ms)")
    elif record.winner == 0 and len(record.candidates) > 1:
        told.append("the first config")
    elif first.failure is not None:
        told.append("the first config cannot run here")
    if (ahead := lead(record)) is not None and record.best.latency_ms is not None:
        told.append(f"{abs(ahead):.1%} {'ahead of the next' if ahead >= 0 else 'behind the fastest kernel'}".replace("%", " %"))
    return ", ".join([*told, reason(record)])


def drag(record: TuningRecord) -> str:
    """The slowest rank: "slowest rank 3 (+1.8 %)"; empty with one rank."""
    found = skew(record)
    return "" if found is None else f"slowest rank {found[0]} (+{100 * found[1]:.1f} %)"


def block(site: Settled, log: Path) -> list[str]:
    """Three lines about one site, as the terminal shows them."""
    record = site.record
    spent = ", ".join(filter(None, [f"{record.seconds:.1f} s", drag(record)]))
    show = f"why: dist-tune show {site.record_id}   " if site.record_id else ""
    return [
        f"{site.name}  {headline(record)}",
        f"  {short_config(record.best)}   {fates(record).text}   {spent}",
        f"  {show}log: {log}",
    ]


def blocks(sites: Sequence[Settled], log: Path) -> list[str]:
    """The lines of all sites; none if they are too many."""
    return [line for site in sites for line in block(site, log)] if len(sites) <= MAX_BLOCKS else []


def show(console: Console, sites: Sequence[Settled], log: Path) -> None:
    """Print blocks, or a table of the sites with the largest share of the step."""
    from rich.text import Text

    is_wrapped = console.is_terminal
    if len(sites) <= MAX_BLOCKS:
        for site in sites:
            first, *others = block(site, log)
            line = Text(first)
            line.stylize("bold", 0, len(site.name))
            for each in (line, *map(Text, others)):
                console.print(each, soft_wrap=not is_wrapped)
        return
    console.print(_table(sites, console.width))
    more = f"and {len(sites) - _MAX_ROWS} more   " if len(sites) > _MAX_ROWS else ""
    record, why = sites[0].record, "why: dist-tune show ID   " * any(site.record_id for site in sites)
    console.print(Text(f"{more}{record.seconds:.1f} s   {why}log: {log}"), soft_wrap=not is_wrapped)


def _table(sites: Sequence[Settled], width: int) -> Table:
    """The sites with the largest share of the step; on a narrow terminal without configs and ids."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    has_ids = width >= _MIN_WIDE and any(site.record_id for site in sites)
    names = ["kernel", "ms", "gain", "step", *["show"] * has_ids, *["config"] * (width >= _MIN_WIDE)]
    rows = [_cells(site, has_ids) for site in sorted(sites, key=lambda each: (-(each.record.best.latency_ms or 0.0), each.number))]
    columns = [[name, *cells] for name, cells in zip(names, zip(*rows[:_MAX_ROWS], strict=True), strict=False)]
    widths = [max(map(cell_len, cells)) for cells in columns]
    # rich would shorten all columns alike, and numbers to nothing: the kernel and the config share what numbers and gaps leave.
    room = width - sum(widths[1 : 4 + has_ids]) - 2 * len(widths)
    widths[0] = max(1, min(widths[0], room if width < _MIN_WIDE else max(room // 2, room - widths[-1])))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, cells_wide in zip(names, widths, strict=True):
        is_text = name in ("kernel", "show", "config")
        table.add_column(
            name,
            width=min(cells_wide, room - widths[0]) if name == "config" else cells_wide,
            overflow="ellipsis",
            no_wrap=True,
            justify="left" if is_text else "right",
        )
    for cells in rows[:_MAX_ROWS]:
        table.add_row(*map(Text, cells[: len(names)]))
    return table


def _cells(site: Settled, has_ids: bool) -> list[str]:
    best, ratio = site.record.best, gain(site.record)
    share = f"{100 * best.latency_ms / best.closure_ms:.0f} %" if best.latency_ms and best.closure_ms else ""
    ms = milliseconds(best.latency_ms) if best.latency_ms is not None else "-"
    return [site.name, ms, f"{ratio:.2f}x" if ratio else "", share, *[site.record_id] * has_ids, short_config(best)]


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


def step_times(sites: Sequence[Settled]) -> tuple[float | None, float | None]:
    """Milliseconds of the step with the first configs, and with the winners; None where a site was not timed.

    Of several sites the differences that their first configs make are added up.
    """
    bests_ms = [each.record.best.closure_ms for each in sites]
    firsts_ms = [each.record.candidates[0].closure_ms for each in sites]
    known_ms = [ms for ms in bests_ms if ms is not None]
    if not sites or len(known_ms) < len(sites):
        return None, None
    best_ms = max(known_ms)
    if any(ms is None for ms in firsts_ms):
        return None, best_ms
    return best_ms + sum((first or 0.0) - best for first, best in zip(firsts_ms, known_ms, strict=True)), best_ms


def _times(seconds: Seconds, meetings: Mapping[str, tuple[int, float]]) -> list[str]:
    # Rounded down, so that the parts are no longer than the whole.
    phases = {name: getattr(seconds, name) for name in _PHASES}
    rest = max(0.0, seconds.total - sum(phases.values()))
    told = " + ".join(f"{name} {_floor(each):.2f}" for name, each in [*phases.items(), ("between them", rest)] if _floor(each) > 0)
    lines = [f"  {seconds.total:.2f} s = {told}" if told else f"  {seconds.total:.2f} s"]
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
