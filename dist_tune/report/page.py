"""Tunings, made of their records, as a page, a text and a JSON document that tell the same. Pure.

The page is one HTML file with all that it needs inside: a template with the facts as JSON, of which
its script makes the page. Texts come from programs and files of unknown origin: no "<" of theirs
reaches the file, and the script sets them as text alone.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from importlib.resources import files
from typing import Any

from dist_tune.log import closure_name, printable, shortened
from dist_tune.records import TuningRecord, words

Tuning = list[TuningRecord]
"""The records of sites that were tuned together, at least one."""
_MOMENT = timedelta(seconds=5)
"""Between two records of one tuning, at most."""
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


def tunings_of(records: Iterable[TuningRecord]) -> list[Tuning]:
    """Records by what the sites of one tuning have in common, the earliest tuning first; several
    ranks may have made them, a moment apart.
    """
    together = defaultdict[str, list[Tuning]](list)
    for record in sorted(records, key=lambda each: each.tuned_at):
        tunings = together[f"{record.closure} {record.n_replays} {record.environment!r}"]
        if not tunings or record.tuned_at - tunings[-1][-1].tuned_at > _MOMENT:
            tunings.append([])
        tunings[-1].append(record)
    found = [tuning for tunings in together.values() for tuning in tunings]
    return sorted(found, key=lambda each: each[0].tuned_at)


def latest(records: Iterable[TuningRecord]) -> Tuning:
    """Those of the last tuning; none of no records."""
    return [[], *tunings_of(records)][-1]


def summary(tunings: Sequence[Tuning]) -> dict[str, Any]:
    """All of it for programs: a JSON document; numbers are None where records do not tell them."""
    titles = [closure_name(each[0].closure) for each in tunings]
    named = list(dict.fromkeys(shortened(each, 80) for each in titles))
    title = ", ".join(named[:3])
    if len(named) > 3:
        title += f" and {len(named) - 3} more"
    told: dict[str, Any] = {"title": title, "machine": {}, "tunings": [], "sites": []}
    if tunings:
        told["machine"] = words.origin([record for each in tunings for record in each])
    seen = Counter[str]()
    for name, tuning in zip(titles, tunings, strict=True):
        seen[name] += 1
        of = name if titles.count(name) == 1 else f"{name}, tuning {seen[name]}"
        first_ms, best_ms = words.step_times(tuning)
        told["tunings"].append(
            {
                "name": shortened(of, 80),
                "first_ms": first_ms,
                "best_ms": best_ms,
                "step": words.times(first_ms, best_ms),
                "took": words.took(tuning[0].spent, tuning[0].n_replays),
            }
        )
        sites = [words.TunedSite(number, each) for number, each in enumerate(tuning, 1)]
        for label, (_, record, _) in zip(words.names(sites), sites, strict=True):
            told["sites"].append(
                {
                    "number": len(told["sites"]) + 1,
                    "label": label,
                    "tuning": of if len(tunings) > 1 else "",
                    "first_ms": record.candidates[0].latency_ms,
                    "best_ms": record.best.latency_ms,
                    "facts": words.facts(record),
                }
            )
    return told


# -- the page --------------------------------------------------------------------------------------


def render(tunings: Sequence[Tuning]) -> str:
    """The page."""
    told = summary(tunings)
    records = [each for tuning in tunings for each in tuning]
    for row, record in zip(told["sites"], records, strict=True):
        row |= _further(row, record)
    embedded = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (files("dist_tune.report") / "page.html").read_text().replace("STORY", embedded, 1)


def _further(row: dict[str, Any], record: TuningRecord) -> dict[str, Any]:
    """What the page has of a site besides: its candidates, each with its cells, its time on each
    rank and its config as Python.
    """
    rows, candidates = words.candidate_rows(record), []
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
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return shortened(value) if isinstance(value, str) else value


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
        lines += [f"  {of}{name}: {each[name]}" for name in ("step", "took")]
    of = ""
    for row in told["sites"]:
        if row["tuning"] != of:
            of = row["tuning"]
            lines += ["", f"{of}:"]
        lines += ["", row["label"]]
        lines += [f"  {heading}: {value}" for heading, value in row["facts"].items()]
    return "".join(f"{printable(line)}\n" for line in lines)
