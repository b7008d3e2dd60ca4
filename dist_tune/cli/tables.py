"""How records look to a person: tables for a terminal.

Pure: values in, renderables out. Knows nothing of files or of who asks. Records come from anywhere, so their texts are shown as they
are, never as markup, and never sent to the terminal with control characters in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dist_tune.cache import CandidateRecord, Environment, TuningRecord

MAX_CHARS = 160
"""Of one text in a table; ``--json`` gives all of it."""
_MAX_CONFIG = 400
_MAX_FIELDS = 12
"""That differ between candidates and get a column each."""
_LAST_COLUMN = 40
"""Characters below which the last column of a table is not squeezed."""
_SEPARATOR = " \N{MIDDLE DOT} "


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say: values for programs, a page for people."""

    values: dict[str, Any]
    page: Sequence[RenderableType]
    exit_code: int = 0
    problems: Sequence[str] = field(default=())
    """For stderr, in either case."""


def plain(text: object, limit: int = MAX_CHARS) -> str:
    """On one line, printable, at most ``limit`` characters with the middle left out."""
    flat = " ".join(str(text).split())
    safe = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in flat)
    if len(safe) <= limit:
        return safe
    return f"{safe[: limit - limit // 3 - 1]}\N{HORIZONTAL ELLIPSIS}{safe[-(limit // 3) :]}"


def ago(moment: datetime) -> str:
    """How long it is since then, in one unit: "3 min", "2 h", "5 d"; a date if it has not come yet on this clock."""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    if seconds < -60:
        return f"{moment:%Y-%m-%d}"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def amount(n: int, noun: str) -> str:
    """The number and the noun: "1 record", "2 records"."""
    return f"{n} {noun}{'s' * (n != 1)}"


def size(n_bytes: float) -> str:
    """With a binary unit: "512 B", "1.5 KiB", "96 KiB", "140 GiB"."""
    units = ["GiB", "MiB", "KiB", "B"]
    while n_bytes >= 1023.5 and len(units) > 1:
        n_bytes /= 1024
        units.pop()
    number = f"{n_bytes:.0f}" if n_bytes >= 10 else f"{n_bytes:.1f}".removesuffix(".0")
    return f"{number} {units[-1]}"


def milliseconds(value: float | None) -> str:
    """Four decimals as in the log, fewer where they say nothing; empty for None."""
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def hardware(where: Environment) -> str:
    """Ranks and devices: "4 ranks on 4 x NVIDIA H200"."""
    ranks = amount(where.world_size, "rank")
    if where.ranks_per_host != where.world_size:
        ranks += f", {where.ranks_per_host} per host,"
    device = plain(where.device, 60)
    return f"{ranks} on {where.device_count} x {device}" if where.device_count else f"{ranks} on {device} without a GPU"


def software(where: Environment) -> str:
    """Versions: "Python 3.11 - torch 2.11.0 - triton 3.6.0 - CUDA 13.0"."""
    cuda = f"CUDA {plain(where.cuda, 30)}" if where.cuda else "no CUDA"
    return _SEPARATOR.join(
        [f"Python {plain(where.python, 30)}", f"torch {plain(where.torch, 40)}", f"triton {plain(where.triton, 40)}", cuda]
    )


def grid(*headings: str, right: Sequence[str] = ()) -> Table:
    """An empty table. ``right``: columns of numbers. Only the last column is ever broken over lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim")
    n_lines = max(heading.count("\n") for heading in headings)
    for heading in headings:
        lowered = "\n" * (n_lines - heading.count("\n")) + heading  # rich aligns headings at the bottom only together with their cells
        table.add_column(lowered, justify="right" if heading in right else "left", no_wrap=heading is not headings[-1], overflow="fold")
    return table


def least_width(page: Sequence[RenderableType]) -> int:
    """Characters of a line that the tables of a page need: a narrower terminal breaks lines, and no table loses digits."""
    return max((_least_width(each) for each in page if isinstance(each, Table)), default=0)


def _least_width(table: Table) -> int:
    widths = []
    for column in table.columns:
        lines = [line for cell in (column.header, *column.cells) for line in str(cell).split("\n")]
        widths.append(max(map(cell_len, lines)) + 2)
    return sum(widths[:-1]) + min(widths[-1], _LAST_COLUMN)


def texts(cells: Sequence[str], style: str = "") -> list[Text]:
    """Cells that are shown as they are, whatever brackets they hold."""
    return [Text(cell, style=style) for cell in cells]


def facts(pairs: Mapping[str, str], indent: int = 0) -> Table:
    """Names and values, one pair to a line; empty values are left out."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        if value:
            table.add_row(Text(" " * indent + name, style="dim"), Text(value))
    return table


def candidates_in_short(record: TuningRecord) -> str:
    """How many there are: "216, 68 dropped"."""
    n_dropped = sum(each.failure is not None for each in record.candidates)
    return f"{len(record.candidates)}, {n_dropped} dropped" if n_dropped else str(len(record.candidates))


def record_list(where: Environment, records: Sequence[tuple[str, TuningRecord]]) -> list[RenderableType]:
    """All records of one environment, each with its id."""
    heading = Text.assemble((hardware(where), "bold"), (_SEPARATOR + software(where), "dim"))
    table = grid("id", "age", "kernel", "key", "ms", "candidates", "winner", right=("age", "ms"))
    for short, record in records:
        key = plain(record.key.replace("torch.", ""), 80)
        cells = [ago(record.tuned_at), plain(record.kernel, 60), key, milliseconds(record.best.latency_ms), candidates_in_short(record)]
        table.add_row(Text(short, style="cyan"), *texts([*cells, plain(record.best.config, _MAX_CONFIG)]))
    return [heading, table, ""]


def record_page(short: str, path: str, record: TuningRecord) -> list[RenderableType]:
    """All that is known of one tuning, its candidates from fastest to slowest."""
    best, where = record.best, record.environment
    title = Text.assemble((plain(record.kernel, 400), "bold"), f" {plain(record.key, 1000)}  ", (short, "cyan"))
    measured = [f"{milliseconds(best.latency_ms)} ms" if best.latency_ms is not None else "not measured"]
    if best.closure_ms is not None:
        measured.append(f"step {milliseconds(best.closure_ms)} ms")
    if len(best.rank_latencies_ms) > 1:
        slowest = max(best.rank_latencies_ms, key=best.rank_latencies_ms.__getitem__)
        measured.append(f"slowest rank {slowest}, fastest {milliseconds(min(best.rank_latencies_ms.values()))} ms")
    shared = shared_fields(record)
    return [
        title,
        facts(
            {
                "winner": f"{best.index}: {plain(best.config, _MAX_CONFIG)}",
                "measured": _SEPARATOR.join(measured),
                "tuned": f"{record.tuned_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, {ago(record.tuned_at)} ago",
                "took": f"{record.seconds:.1f} s ({phases(record)}), {amount(record.n_replays, 'replay')} of {plain(record.closure)}",
                "on": hardware(where),
                "with": software(where),
                "source": plain(record.source),
                "file": plain(path, 1000),
                "candidates": outcomes(record) + (f"; all with {plain(config_text(shared), 1000)}" if shared else ""),
            },
            indent=2,
        ),
        "",
        candidate_table(record),
    ]


def phases(record: TuningRecord) -> str:
    """Where the seconds went: "discover 0.9, compile 1.2, ..."."""
    spent = record.spent.model_dump(exclude={"total"})
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items() if seconds >= 0.05) or "no phase took 0.1 s"


def outcomes(record: TuningRecord) -> str:
    """What came of the candidates: "216: 4 to the end, 144 left the race, 68 dropped"."""
    n_dropped = sum(each.failure is not None for each in record.candidates)
    n_left = sum(each.failure is None and each.left is not None for each in record.candidates)
    n_stayed = len(record.candidates) - n_left - n_dropped
    parts = [f"{n_stayed} to the end"] + [f"{n_left} left the race"] * bool(n_left) + [f"{n_dropped} dropped"] * bool(n_dropped)
    return f"{len(record.candidates)}: {', '.join(parts)}"


def shared_fields(record: TuningRecord) -> dict[str, Any]:
    """What all candidates have in common; nothing where there is but one."""
    first, *others = (each.fields for each in record.candidates)
    return {name: value for name, value in first.items() if all((name, value) in other.items() for other in others)} if others else {}


def config_text(fields: Mapping[str, Any]) -> str:
    """Fields on one line: "BLOCK_M=128 num_warps=4"."""
    return " ".join(f"{name}={value!r}" for name, value in fields.items())


def candidate_table(record: TuningRecord) -> Table:
    """Every candidate, fastest first, the dropped ones last with the reason; without columns that say nothing."""
    ordered = sorted(
        record.candidates, key=lambda each: (each.failure is not None, each.latency_ms is None, each.latency_ms or 0.0, each.index)
    )
    numbers = {each.index: _numbers(each, record.best) for each in ordered}
    columns = [name for name in numbers[record.winner] if any(row[name] for row in numbers.values())]
    configs = _config_columns(record)
    # Stacked, for the numbers beneath are narrow.
    stacked = [plain(name, 40).replace("_", "_\n") for name in configs]
    table = grid("", "#", *columns, *stacked, "", right=("#", *columns, *(stacked if len(configs) > 1 else ())))
    for each in ordered:
        is_best = each.index == record.winner
        style = "bold green" if is_best else "red" if each.failure is not None else ""
        row = [
            ">" * is_best,
            str(each.index),
            *(numbers[each.index][name] for name in columns),
            *(plain(cells[each.index]) for cells in configs.values()),
        ]
        fate = "winner" if is_best else plain(each.failure if each.failure is not None else each.left or "")
        table.add_row(*texts(row, style if is_best else ""), Text(fate, style=style or "dim"))
    return table


def _config_columns(record: TuningRecord) -> dict[str, list[Any]]:
    """A column for each field that differs between candidates; one with whole configs where there are many, or fields are not known."""
    shared = shared_fields(record)
    names = {name: None for each in record.candidates for name in each.fields if name not in shared}
    if not 0 < len(names) <= _MAX_FIELDS or not all(each.fields for each in record.candidates):
        return {"config": [each.config for each in record.candidates]}
    return {name: [each.fields.get(name, "") for each in record.candidates] for name in names}


def _numbers(each: CandidateRecord, best: CandidateRecord) -> dict[str, str]:
    ranks_ms = each.rank_latencies_ms.values()
    is_behind = each.index != best.index and each.latency_ms is not None and bool(best.latency_ms)
    behind = (each.latency_ms or 0.0) / (best.latency_ms or 1.0) - 1.0
    return {
        "agreed\nms": milliseconds(each.latency_ms),
        "behind": f"{behind:+.1%}" if is_behind else "",
        "+/- ms": milliseconds(each.spread_ms),
        "step\nms": milliseconds(each.closure_ms),
        "fastest\nrank ms": milliseconds(min(ranks_ms)) if len(ranks_ms) > 1 else "",  # the slowest rank's is the agreed time
        "replays": str(each.n_replays or ""),
        "shared": size(each.shared_bytes) if each.shared_bytes is not None else "",
        "regs": "" if each.n_regs is None else str(each.n_regs),
        "spills": "" if each.n_spills is None else str(each.n_spills),
    }
