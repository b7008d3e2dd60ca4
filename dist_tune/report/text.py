"""The story as plain lines, and as one JSON document. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dist_tune.output import printable
from dist_tune.report.importance import parameters
from dist_tune.report.overview import Row, headline, messages, overview
from dist_tune.report.plots import straggler_words
from dist_tune.report.story import SiteStory, Story, shortened

_MAX_NAMED = 3
"""Parameters that a site's lines name."""


def text(story: Story) -> str:
    """Lines for a terminal or a mail: the head, then a few lines for each site."""
    head = headline(story)
    lines = [f"Tuning of {head.title}", *(f"  {name}: {value}" for name, value in head.facts)]
    lines += [f"  came last to meetings{of}: {words}" for of, words in _stragglers(story)]
    lines += [f"  note: {note}" for note in story.damage + story.notes]
    lines += [f"  {shortened(each)}" for each in messages(story, 20)]
    tuning = ""
    for row, (_, site) in zip(overview(story), story.sites, strict=True):
        if row.tuning != tuning:
            tuning = row.tuning
            lines += ["", f"{tuning}:"]
        lines += ["", *_site(row, site)]
    return "".join(f"{printable(line)}\n" for line in lines)


def summary(story: Story) -> dict[str, Any]:
    """The same for programs."""
    head = headline(story)
    sites = [
        asdict(row) | {"explained": {each.name: round(each.explained, 4) for each in parameters(site.record)} if site.record else {}}
        for row, (_, site) in zip(overview(story), story.sites, strict=True)
    ]
    return {"title": head.title, "facts": dict(head.facts), "notes": story.damage + story.notes, "sites": sites}


def _stragglers(story: Story) -> list[tuple[str, str]]:
    told = [(f" of {story.name_of(tuning)}" * (len(story.tunings) > 1), straggler_words(tuning)) for tuning in story.tunings.values()]
    return [(of, words) for of, words in told if words]


def _site(row: Row, site: SiteStory) -> list[str]:
    told = [row.label]
    if row.ms is not None:
        told.append(f"{row.ms:.4g} ms")
    if row.gain_words:
        told.append(row.gain_words)
    lines = ["  ".join([told[0], ", ".join(told[1:])]).rstrip()]
    lines += [f"  {row.winner}"] if row.winner else []
    lines.append(f"  {row.outcomes}" + f"; {row.n_pruned} more pruned before" * bool(row.n_pruned))
    reasons = dict.fromkeys(each for each in (row.reason, row.confidence) if each)
    lines.append(f"  chosen: {'; '.join(reasons)}" if row.winner else f"  {row.reason}")
    if row.slowest_rank:
        lines.append(f"  slowest rank: {row.slowest_rank}")
    if site.record is not None and (found := [each for each in parameters(site.record) if each.explained >= 0.005][:_MAX_NAMED]):
        lines.append("  matters most: " + ", ".join(f"{each.name} ({100 * each.explained:.0f} % of the variance)" for each in found))
    if row.record_id:
        lines.append(f"  all of it: dist-tune show {row.record_id}")
    return lines
