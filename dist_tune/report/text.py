"""The story as lines for a terminal or a mail, and as one JSON document. Pure."""

from __future__ import annotations

from typing import Any

from dist_tune.output import printable
from dist_tune.report import facts
from dist_tune.report.story import SiteStory, Story, shortened

_MAX_NAMED = 3
"""Parameters that a site's lines name."""


def text(story: Story) -> str:
    """The head, then a few lines for each site."""
    lines = [f"Tuning of {facts.title(story)}", *(f"  {name}: {value}" for name, value in facts.head(story).items())]
    for tuning in story.tunings.values():
        if words := facts.stragglers(tuning):
            lines.append(f"  came last to meetings{f' of {story.name_of(tuning)}' * (len(story.tunings) > 1)}: {words}")
    lines += [f"  note: {note}" for note in story.damage + story.notes]
    lines += [f"  {shortened(each)}" for each in facts.messages(story.messages, story, 20)]
    name = ""
    for row, (_, site) in zip(facts.rows(story), story.sites, strict=True):
        if row["tuning"] != name:
            name = row["tuning"]
            lines += ["", f"{name}:"]
        lines += ["", *_site(row, site)]
    return "".join(f"{printable(line)}\n" for line in lines)


def summary(story: Story) -> dict[str, Any]:
    """The same for programs."""
    sites = [
        row | {"explained": {name: round(part, 4) for name, part in facts.parameters(site.record).items()}}
        for row, (_, site) in zip(facts.rows(story), story.sites, strict=True)
    ]
    return {"title": facts.title(story), "facts": facts.head(story), "notes": story.damage + story.notes, "sites": sites}


def _site(row: dict[str, Any], site: SiteStory) -> list[str]:
    times = ", ".join(([f"{row['ms']:.4g} ms"] if row["ms"] is not None else []) + [row["gain_words"]] * bool(row["gain_words"]))
    reasons = "; ".join(dict.fromkeys(each for each in (row["reason"], row["confidence"]) if each))
    most = [f"{name} ({100 * part:.0f} % of the variance)" for name, part in facts.parameters(site.record).items() if part >= 0.005]
    lines = [
        f"{row['label']}  {times}".rstrip(),
        row["winner"] and f"  {row['winner']}",
        f"  {row['outcomes']}" + f"; {row['n_pruned']} more pruned before" * bool(row["n_pruned"]),
        f"  {'chosen: ' * bool(row['winner'])}{reasons}",
        row["slowest_rank"] and f"  slowest rank: {row['slowest_rank']}",
        most and f"  matters most: {', '.join(most[:_MAX_NAMED])}",
        row["record_id"] and f"  all of it: dist-tune show {row['record_id']}",
    ]
    return [line for line in lines if line]
