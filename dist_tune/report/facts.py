"""Tunings in words: facts that the page, the text and the JSON document show alike. Pure.

The page is one HTML file with all that it needs inside: a template with the facts as JSON, of which
its script makes the page. Texts come from programs and files of unknown origin: no "<" of theirs
reaches the file, and the script sets them as text alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC
from importlib.resources import files
from typing import Any

from dist_tune.log import PHASES, amount, phase_told, printable, shortened
from dist_tune.records import TuningRecord, account
from dist_tune.report.tunings import Tuning

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


def summary(tunings: Sequence[Tuning]) -> dict[str, Any]:
    """All of it for programs: a JSON document.

    Texts are empty, and numbers None, where records do not tell them.
    """
    titles = list(dict.fromkeys(shortened(each.title, 80) for each in tunings))
    title = ", ".join(titles[:3])
    if len(titles) > 3:
        title += f" and {len(titles) - 3} more"
    names = _names(tunings)
    sites = [
        {
            "label": label,
            "tuning": name if len(tunings) > 1 else "",
            "ms": record.best.latency_ms,
            "gain": account.gain(record),
            "facts": account.facts(record),
        }
        for name, tuning in zip(names, tunings, strict=True)
        for label, record in tuning.sites.items()
    ]
    return {
        "title": title,
        "machine": _machine(tunings),
        "tunings": [_tuning(name, each) for name, each in zip(names, tunings, strict=True)],
        "sites": [{"number": number, **site} for number, site in enumerate(sites, 1)],
    }


def _names(tunings: Sequence[Tuning]) -> list[str]:
    """The title of each; with a number where several share it."""
    titles, seen = [each.title for each in tunings], defaultdict[str, int](int)
    names = []
    for title in titles:
        seen[title] += 1
        names.append(title if titles.count(title) == 1 else f"{title}, tuning {seen[title]}")
    return names


def _machine(tunings: Sequence[Tuning]) -> dict[str, str]:
    """Date, ranks, devices and versions, of the last tuning."""
    if not tunings:
        return {}
    record = tunings[-1].records[0]
    where = record.environment
    devices = dict.fromkeys(each.environment.device for of in tunings for each in of.records)
    versions = where.model_dump(include={"python", "torch", "triton", "cuda"}, exclude_none=True)
    return {
        "tuned": f"{record.tuned_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        "ranks": f"{amount(where.world_size, 'rank')}, {', '.join(devices)}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _tuning(name: str, tuning: Tuning) -> dict[str, Any]:
    """Steps and seconds of a tuning, in numbers and in words."""
    first_ms, best_ms = tuning.step_ms
    spent = tuning.records[0].spent
    parts: dict[str, float] = {phase: getattr(spent, phase) for phase in PHASES}
    parts["other"] = spent.total - sum(parts.values())
    step = ""
    if first_ms and best_ms:
        steps = f"{first_ms:.4g} ms with the first configs, {best_ms:.4g} ms with the winners"
        step = f"{steps}: {first_ms / best_ms:.2f}x"
    seconds = ", ".join(f"{phase_told(part)} {s:.1f}" for part, s in parts.items() if s > 0.005)
    replays = amount(tuning.records[0].n_replays, "replay")
    return {
        "name": shortened(name, 80),
        "first_ms": first_ms,
        "best_ms": best_ms,
        "step": step,
        "took": f"{spent.total:.1f} s ({seconds}), {replays}" if seconds else "",
        "meetings": f"{spent.meetings:.2f} s, a part of the phases" if spent.meetings else "",
    }


# -- the page --------------------------------------------------------------------------------------


def render(tunings: Sequence[Tuning]) -> str:
    """The page."""
    told = summary(tunings)
    records = [each for tuning in tunings for each in tuning.records]
    told["sites"] = [
        row | _further(row, record) for row, record in zip(told["sites"], records, strict=True)
    ]
    embedded = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (files("dist_tune.report") / "page.html").read_text().replace("STORY", embedded, 1)


def _further(row: dict[str, Any], record: TuningRecord) -> dict[str, Any]:
    """What the page has of a site besides: its candidates, each with its cells, its time on each
    rank and its config as Python.
    """
    rows, candidates = account.candidate_rows(record), []
    for cells in rows:
        each = record.candidates[cells["#"]]
        candidates.append(
            {
                "cells": [_rounded(value) for value in cells.values()],
                "ranks": [(rank, _rounded(ms)) for rank, ms in each.rank_latencies_ms.items()],
                "python": python_config(each.fields) if each.fields else each.config,
                "is_best": each is record.best,
                "is_near": each.left is None,
            }
        )
    return {
        "label": shortened(", ".join(filter(None, (row["label"], row["tuning"]))), 140),
        "site": f"{record.kernel} {record.key}",
        "headings": list(rows[0]),
        "candidates": candidates,
    }


def _rounded(value: Any) -> Any:
    return (
        float(f"{value:.4g}")
        if isinstance(value, float)
        else shortened(value)
        if isinstance(value, str)
        else value
    )


def python_config(fields: Mapping[str, Any]) -> str:
    """A config as Python: ``triton.Config({'BLOCK_M': 128}, num_warps=4)``; of a function's keyword
    arguments a dict. Hooks are named.
    """
    values, inner, hook = dict[str, str](), defaultdict[str, dict[str, Any]](dict), ""
    for name, value in fields.items():
        outer, _, field = name.partition(".")
        if field:  # of a config that is a function's argument
            inner[outer][field] = value
            values[outer] = python_config(inner[outer])
        elif name == "pre_hook":
            hook = f"  # with pre_hook {value}"
        else:
            values[name] = repr(value)
    is_config = {"num_warps", "num_stages"} <= values.keys()
    options = "".join(
        f", {name}={values.pop(name)}" for name in _OPTIONS if is_config and name in values
    )
    plain = f"{{{', '.join(f'{name!r}: {text}' for name, text in values.items())}}}"
    return f"triton.Config({plain}{options}){hook}" if is_config else plain + hook


# -- the text --------------------------------------------------------------------------------------


def text(tunings: Sequence[Tuning]) -> str:
    """The head, then a few lines for each site."""
    told = summary(tunings)
    lines = [
        f"Tuning of {told['title']}",
        *(f"  {name}: {value}" for name, value in told["machine"].items()),
    ]
    for each in told["tunings"]:
        of = f"{each['name']}, " if len(told["tunings"]) > 1 else ""
        facts = {"step": each["step"], "took": each["took"], "waits": each["meetings"]}
        lines += [f"  {of}{name}: {value}" for name, value in facts.items() if value]
    of = ""
    for row in told["sites"]:
        if row["tuning"] != of:
            of = row["tuning"]
            lines += ["", f"{of}:"]
        lines += ["", row["label"]]
        lines += [f"  {heading}: {value}" for heading, value in row["facts"].items()]
    return "".join(f"{printable(line)}\n" for line in lines)
