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

from dist_tune.cache import CandidateRecord, TuningRecord, differing, from_fastest, shared_fields, weighing, why_not
from dist_tune.report import facts
from dist_tune.report.story import SiteStory, Story, shortened

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
_SHOWN = {"index", "latency_ms", "closure_ms", "n_replays", "n_regs", "n_spills", "shared_bytes"}


def render(story: Story) -> str:
    """The page."""
    told = facts.summary(story)
    content = {
        "title": shortened(told["title"]),
        "machine": list(facts.machine(story).items()),
        "tunings": told["tunings"],
        "notes": told["notes"] + facts.messages(story.messages, story, 50),
        "sites": [_site(row, site) for row, (_, site) in zip(told["sites"], story.sites, strict=True)],
    }
    embedded = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (files("dist_tune.report") / "page.html").read_text().replace("STORY", embedded, 1)


def _site(row: dict[str, Any], site: SiteStory) -> dict[str, Any]:
    label = shortened(f"{row['label']}{', ' * bool(row['tuning'])}{row['tuning']}", 140)
    told = {**row, "label": label, "site": f"{site.met.kernel} {site.met.key}", "miss": site.met.miss, "candidates": []}
    if (record := site.record) is None:
        return told
    names = differing(record.candidates)
    shown = [_candidate(record, each, names) for each in from_fastest(record)]
    return {
        **told,
        "weight": weighing(record),
        "shared": shared_fields(record),
        "best": record.winner,
        "fields": names,
        "candidates": shown,
    }


def _candidate(record: TuningRecord, each: CandidateRecord, names: list[str]) -> dict[str, Any]:
    return each.model_dump(include=_SHOWN, exclude_none=True) | {
        "ranks": [(rank, float(f"{ms:.5g}")) for rank, ms in each.rank_latencies_ms.items()],
        "spread_ms": each.known_spread_ms,
        "is_near": each.left is None,
        "values": [str(each.fields.get(name, "-")) for name in names],
        "why": shortened(why_not(each, record)),
        "python": python_config(each.fields) if each.fields else each.config,
    }


def python_config(fields: Mapping[str, Any]) -> str:
    """A config as Python: ``triton.Config({'BLOCK_M': 128}, num_warps=4)``; of a function's keyword arguments a dict."""
    hooks = [value for name, value in fields.items() if name.rpartition(".")[2] == "pre_hook"]
    return _python(fields) + f"  # with pre_hook {', '.join(hooks)}" * bool(hooks)


def _python(fields: Mapping[str, Any]) -> str:
    values, inner = dict[str, str](), defaultdict[str, dict[str, Any]](dict)
    for name, value in fields.items():
        outer, _, field = name.partition(".")
        if field:  # of a config that is a function's argument
            inner[outer][field] = value
            values[outer] = _python(inner[outer])
        elif name != "pre_hook":
            values[name] = repr(value)
    is_config = {"num_warps", "num_stages"} <= values.keys()
    options = [f", {name}={values.pop(name)}" for name in _OPTIONS if is_config and name in values]
    plain = f"{{{', '.join(f'{name!r}: {text}' for name, text in values.items())}}}"
    return f"triton.Config({plain}{''.join(options)})" if is_config else plain
