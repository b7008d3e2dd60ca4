"""The report page: one HTML file with all that it needs inside. Pure, except that it reads its own template.

The story is embedded as JSON, and the template's script makes the page of it. Texts come from programs and files of unknown origin: no
"<" of theirs reaches the file, and the script sets them as text alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from dist_tune.cache import shared_fields
from dist_tune.report import facts
from dist_tune.report.story import SiteStory, Story

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


def render(story: Story) -> str:
    """The page."""
    told = facts.summary(story)
    told["notes"] += facts.messages(story, 50)
    told["sites"] = [row | _further(row, site) for row, (_, _, site) in zip(told["sites"], story.sites, strict=True)]
    embedded = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (files("dist_tune.report") / "page.html").read_text().replace("STORY", embedded, 1)


def _further(row: dict[str, Any], site: SiteStory) -> dict[str, Any]:
    """What the page has of a site besides: its candidates, each with its cells, its time on each rank and its config as Python."""
    label = facts.shortened(", ".join(filter(None, (row["label"], row["tuning"]))), 140)
    told = {"label": label, "site": f"{site.met.kernel} {site.met.key}", "miss": site.met.miss, "candidates": []}
    if (record := site.record) is None:
        return told
    rows, candidates = facts.candidate_rows(record), []
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
    return told | {"shared": shared_fields(record), "headings": list(rows[0]), "candidates": candidates}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else facts.shortened(value) if isinstance(value, str) else value


def python_config(fields: Mapping[str, Any]) -> str:
    """A config as Python: ``triton.Config({'BLOCK_M': 128}, num_warps=4)``; of a function's keyword arguments a dict. Hooks are named."""
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
    options = "".join(f", {name}={values.pop(name)}" for name in _OPTIONS if is_config and name in values)
    plain = f"{{{', '.join(f'{name!r}: {text}' for name, text in values.items())}}}"
    return f"triton.Config({plain}{options}){hook}" if is_config else plain + hook
