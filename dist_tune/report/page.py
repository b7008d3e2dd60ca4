"""The report page: one HTML file with all that it needs inside. Pure, except that it reads its own template.

All texts come from programs and files of unknown origin: the template escapes each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jinja2

from dist_tune.cache import CandidateRecord, TuningRecord, differing, short_config, weighing, why_not
from dist_tune.output import printable
from dist_tune.report import facts
from dist_tune.report.importance import value_of
from dist_tune.report.overview import Row, headline, messages, overview
from dist_tune.report.plots import draw, site_charts, tuning_charts
from dist_tune.report.story import SiteStory, Story, shortened

_MAX_FIELDS = 12
"""Columns of config fields; with more differing ones there is one column of whole configs."""
_MAX_REASON = 160


def render(story: Story) -> str:
    """The page."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("dist_tune.report", "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, finalize=lambda value: printable(value) if type(value) is str else value,
    )  # fmt: skip
    tunings = [(story.name_of(tuning), [draw(chart) for chart in tuning_charts(tuning)]) for tuning in story.tunings.values()]
    rows = overview(story)
    templates.filters["shortened"] = shortened
    sites = [_site(row, site) for row, (_, site) in zip(rows, story.sites, strict=True)]
    return templates.get_template("report.html.j2").render(
        headline=headline(story),
        rows=rows,
        tunings=tunings,
        sites=sites,
        notes=story.damage + story.notes,
        messages=messages(story, 50),
        phases=[phase for phase in facts.PHASES if any(each.seconds.get(phase) for each in story.tunings.values())],
    )


def _site(row: Row, site: SiteStory) -> Mapping[str, Any]:
    record = site.record
    values: dict[str, Any] = {"row": row, "site": site, "charts": [], "columns": [], "table": [], "shared": "", "step_weight": ""}
    if record is None:
        return values
    fields = differing(record.candidates)
    fields = fields if len(fields) <= _MAX_FIELDS else []
    shared = {name: value for name, value in record.best.fields.items() if name not in fields} if len(fields) > 0 else {}
    columns = [
        "#",
        "ms",
        "x winner",
        "\N{PLUS-MINUS SIGN} ms",
        "step ms",
        "replays",
        "registers",
        "spills",
        "shared KiB",
        *(fields or ["config"]),
        "outcome",
        "why",
    ]
    table = [_cells(record, each, fields) for each in sorted(record.candidates, key=_order)]
    kept = [k for k in range(len(columns)) if any(cells[k] != "" for cells in table)]
    return values | {
        "step_weight": weighing(record),
        "charts": [draw(chart) for chart in site_charts(record)],
        "columns": [columns[k] for k in kept],
        "table": [([cells[k] for k in kept], cells[0] == record.winner) for cells in table],
        "shared": " ".join(f"{name}={value}" for name, value in shared.items()),
    }


def _order(each: CandidateRecord) -> tuple[bool, bool, float]:
    return each.failure is not None, each.latency_ms is None, each.latency_ms or 0.0


def _cells(record: TuningRecord, each: CandidateRecord, fields: list[str]) -> list[str | int]:
    def rounded(value: float | None, digits: str) -> str:
        return "" if value is None else f"{value:{digits}}"

    best_ms = record.best.latency_ms
    ratio = each.latency_ms / best_ms if each.latency_ms and best_ms and math.isfinite(each.latency_ms / best_ms) else None
    config = [value_of(each, name) for name in fields] or [short_config(each)]
    why = why_not(each, record)
    shared_kib = each.shared_bytes and each.shared_bytes / 1024
    return [
        each.index, rounded(each.latency_ms, ".4g"), rounded(ratio, ".2f"), rounded(each.known_spread_ms, ".2g"),
        rounded(each.closure_ms, ".4g"),
        each.n_replays or "", rounded(each.n_regs, "d"), rounded(each.n_spills, "d"), rounded(shared_kib, ".4g"), *config,
        facts.fate(record, each), why if len(why) <= _MAX_REASON else f"{why[:_MAX_REASON]}\N{HORIZONTAL ELLIPSIS}",
    ]  # fmt: skip
