"""A story in words: facts that the page, the text and the JSON document show alike. Pure.

The page is one HTML file with all that it needs inside: a template with the story as JSON, of which
its script makes the page. Texts come from programs and files of unknown origin: no "<" of theirs
reaches the file, and the script sets them as text alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from dist_tune.log import PHASES, amount, events, phase_told, printable, shortened
from dist_tune.records import account
from dist_tune.report.tunings import SiteStory, Story, TuningStory, numbers

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


def summary(story: Story) -> dict[str, Any]:
    """All of it for programs: a JSON document.

    Texts are empty, and numbers None, where the story does not tell them.
    """
    titles = list(dict.fromkeys(shortened(tuning.title, 80) for tuning in story.tunings.values()))
    title = ", ".join(titles[:3])
    if len(titles) > 3:
        title += f" and {len(titles) - 3} more"
    sites = []
    for number, (tuning, name, site) in enumerate(story.sites, 1):
        of = story.name_of(tuning) if len(story.tunings) > 1 else ""
        sites.append(
            {
                "number": number,
                "label": name,
                "tuning": of,
                "n_pruned": site.met.n_pruned,
                **_outcome(site),
            }
        )
    tunings = [_tuning(story, each) for each in story.tunings.values()]
    return {
        "title": title,
        "machine": machine(story),
        "tunings": tunings,
        "notes": [*story.damage.values(), *story.notes],
        "sites": sites,
    }


def machine(story: Story) -> dict[str, str]:
    """Ranks, devices and versions."""
    runs = list(story.runs.values())
    devices = dict.fromkeys(run.device for run in runs)
    return (
        {
            "tuned": max(run.date for run in runs),
            "ranks": f"{amount(runs[0].world_size, 'rank')}, {', '.join(devices)}",
            "versions": ", ".join(
                f"{name} {version}" for name, version in runs[0].versions.items()
            ),
            "command": " ".join(runs[0].command),
        }
        if runs
        else {}
    )


def _tuning(story: Story, tuning: TuningStory) -> dict[str, Any]:
    """Steps and seconds of a tuning, in numbers and in words."""
    end = tuning.teller.done or events.TuningEnded(at=0.0, rank=0)
    parts: dict[str, float] = {name: end.seconds.get(name, 0.0) for name in PHASES}
    parts["other"] = end.seconds.get("total", 0.0) - sum(parts.values())
    told = {
        "name": shortened(story.name_of(tuning), 80),
        "first_ms": end.first_ms,
        "best_ms": end.best_ms,
        "step": "",
        "took": "",
    }
    if end.first_ms and end.best_ms:
        steps = (
            f"{end.first_ms:.4g} ms with the first configs, {end.best_ms:.4g} ms with the winners"
        )
        told["step"] = f"{steps}: {end.first_ms / end.best_ms:.2f}x"
    if seconds := ", ".join(
        f"{phase_told(name)} {seconds:.1f}" for name, seconds in parts.items() if seconds > 0.005
    ):
        told["took"] = (
            f"{end.seconds.get('total', 0.0):.1f} s ({seconds}), {amount(end.n_replays, 'replay')}"
        )
    meetings = end.seconds.get("meetings", 0.0)
    return told | {"meetings": f"{meetings:.2f} s, a part of the phases" if meetings else ""}


def messages(story: Story, limit: int) -> list[str]:
    """Lines of the log, each once with the ranks that wrote it, and with names of sites in place of
    labels; the last ``limit``.
    """
    names = {f"site={site.met.label}": name for _, name, site in story.sites}
    ranks = defaultdict[tuple[str, str], set[int]](set)
    for each in story.messages:
        text = each.text
        # One label may begin with another.
        for label in sorted(names, key=len, reverse=True) if "site=" in text else ():
            text = text.replace(label, names[label])
        ranks[each.level, text].add(each.rank)
    found = list(ranks.items())[-limit:]
    return [
        f"{'ranks' if len(writers) > 1 else 'rank'} {numbers(writers)}, {level}: {text}"
        for (level, text), writers in found
    ]


def _outcome(site: SiteStory) -> dict[str, Any]:
    """The winner of a site, or how far the race has come."""
    record, rung = site.record, site.rung
    if record is not None and site.won is not None:
        told = {
            "ms": record.best.latency_ms,
            "gain": account.gain(record),
            "record_id": site.won.record_id,
        }
        return {**told, "facts": account.facts(record)}
    return {
        "ms": rung.best_ms if rung else None,
        "gain": None,
        "record_id": "",
        "facts": {"chosen": f"not yet: {_state(site)}"},
    }


def _state(site: SiteStory) -> str:
    if site.won is not None:
        return f"winner {site.config(site.won.winner)}, {site.won.reason}"
    if rung := site.rung:
        left = f"{rung.n_left} of {len(site.met.configs)} left"
        return f"{left}, best so far {rung.best_ms:.4g} ms {site.config(rung.best)}"
    return f"{len(site.met.configs)} candidates, {site.n_dropped} dropped"


# -- the page --------------------------------------------------------------------------------------


def render(story: Story) -> str:
    """The page."""
    told = summary(story)
    told["notes"] += messages(story, 50)
    told["sites"] = [
        row | _further(row, site)
        for row, (_, _, site) in zip(told["sites"], story.sites, strict=True)
    ]
    embedded = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (files("dist_tune.report") / "page.html").read_text().replace("STORY", embedded, 1)


def _further(row: dict[str, Any], site: SiteStory) -> dict[str, Any]:
    """What the page has of a site besides: its candidates, each with its cells, its time on each
    rank and its config as Python.
    """
    label = shortened(", ".join(filter(None, (row["label"], row["tuning"]))), 140)
    told = {
        "label": label,
        "site": f"{site.met.kernel} {site.met.key}",
        "miss": site.met.miss,
        "candidates": [],
    }
    if (record := site.record) is None:
        return told
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
    return told | {"headings": list(rows[0]), "candidates": candidates}


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


def text(story: Story) -> str:
    """The head, then a few lines for each site."""
    told = summary(story)
    lines = [
        f"Tuning of {told['title']}",
        *(f"  {name}: {value}" for name, value in told["machine"].items()),
    ]
    for each in told["tunings"]:
        of = f"{each['name']}, " if len(told["tunings"]) > 1 else ""
        facts = {"step": each["step"], "took": each["took"], "waits": each["meetings"]}
        lines += [f"  {of}{name}: {value}" for name, value in facts.items() if value]
    lines += [f"  note: {note}" for note in told["notes"]]
    lines += [f"  {shortened(each)}" for each in messages(story, 20)]
    of = ""
    for row in told["sites"]:
        if row["tuning"] != of:
            of = row["tuning"]
            lines += ["", f"{of}:"]
        pruned = {"pruned before": row["n_pruned"]} if row["n_pruned"] else {}
        lines += [
            "",
            row["label"],
            *(f"  {heading}: {value}" for heading, value in (row["facts"] | pruned).items()),
        ]
    return "".join(f"{printable(line)}\n" for line in lines)
