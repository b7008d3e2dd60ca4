"""``dist-tune doctor``: the report of doctor.py as tables, bad news where the eye ends up."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dist_tune.cli.doctor import Finding, Report, examine
from dist_tune.cli.machine import Gpu
from dist_tune.cli.tables import Answer, facts, grid, plain, size, texts

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "bold yellow"), "off": ("off", "dim"), "fail": ("FAIL", "bold red")}


def run(asked: Namespace) -> Answer:
    """Examine this machine. Exit code 1 if nothing can be tuned here, whatever else works."""
    report = examine()
    return Answer({"can_tune": report.can_tune, "verdict": report.verdict, **asdict(report)}, page(report), 0 if report.can_tune else 1)


def page(report: Report) -> list[RenderableType]:
    """The whole report, the verdict last."""
    sections: list[tuple[str, RenderableType | None]] = [
        ("Versions", facts({name: plain(version or "-") for name, version in report.versions.items()}, indent=2)),
        ("GPUs", _gpu_table(report.gpus) if report.gpus else None),
        ("Links", _link_table(report.links) if len(report.links) > 1 else None),
        ("Environment", facts({name: plain(value) for name, value in report.variables.items()}, indent=2) if report.variables else None),
        ("Checks", _finding_table(report.findings)),
    ]
    shown: list[RenderableType] = []
    for title, table in sections:
        if table is not None:
            shown += [Text(title, style="bold"), table, ""]
    return [*shown, Text(report.verdict, style="bold green" if report.can_tune else "bold red")]


def _gpu_table(gpus: Sequence[Gpu]) -> Table:
    table = grid("  #", "name", "sm", "memory", "in use", "busy", "SMs", "L2", right=("  #", "sm", "memory", "in use", "busy", "SMs", "L2"))
    for gpu in gpus:
        used = size(gpu.used_mib * 2**20) if gpu.used_mib is not None else "?"
        busy = f"{gpu.busy_percent} %" if gpu.busy_percent is not None else "?"
        cells = [
            str(gpu.index),
            plain(gpu.name),
            gpu.capability,
            size(gpu.memory_bytes),
            used,
            busy,
            str(gpu.n_multiprocessors),
            size(gpu.l2_bytes),
        ]
        table.add_row(*texts(cells))
    return table


def _link_table(links: Sequence[Sequence[str]]) -> Table:
    numbers = [str(number) for number in range(len(links))]
    table = grid("  from", *numbers, right=("  from", *numbers))
    for number, cells in zip(numbers, links, strict=True):
        table.add_row(number, *(Text(cell or "-", style="bold red" if cell == "none" else "" if cell else "dim") for cell in cells))
    return table


def _finding_table(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.state]
        name = Text(finding.name, style="dim" if finding.state == "off" else "")
        table.add_row(Text(f"  {mark}", style=style), name, Text(plain(finding.fact, 500), style="dim" if finding.state == "off" else ""))
        if finding.advice:
            table.add_row("", "", Text(f"-> {finding.advice}", style="dim" if finding.state == "off" else style))
    return table
