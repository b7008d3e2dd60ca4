"""The story in a few lines: its head, and a row for each site. Pure; the page, the text and the JSON document show the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path
from typing import Any

from dist_tune.cache import TuningRecord, fates, gain, short_config, skew
from dist_tune.output import gain_words
from dist_tune.report import facts
from dist_tune.report.story import SiteStory, Story, TuningStory, shortened

_MAX_TUNINGS = 60
"""In the head."""


@dataclass(frozen=True, slots=True)
class Row:
    """A site in the overview. Texts are empty, and numbers None, where the story does not tell them."""

    number: int
    """From 1 on, in the story."""
    label: str
    closure: str
    winner: str = ""
    """Its config."""
    tuning: str = ""
    """With the number of the call; empty where the story has one tuning."""
    ms: float | None = None
    gain: float | None = None
    """Times as fast as the first config."""
    gain_text: str = ""
    """The gain, or the reason why there is none."""
    gain_words: str = ""
    first_ms: float | None = None
    confidence: str = ""
    reason: str = ""
    outcomes: str = ""
    n_pruned: int = 0
    slowest_rank: str = ""
    record_id: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """The story's head."""

    title: str
    facts: tuple[tuple[str, str], ...]
    """Names and values."""
    tunings: tuple[tuple[str, TuningStory], ...] = ()
    """Where there are several, each with its name, as in the last of the facts."""

    @property
    def machine(self) -> tuple[tuple[str, str], ...]:
        """The facts without those of several tunings, which the page has in a table."""
        return self.facts[: len(self.facts) - len(self.tunings)]


def headline(story: Story) -> Headline:
    """Title, machine, versions, and each tuning's steps and seconds."""
    closures = list(dict.fromkeys(shortened(tuning.title, 80) for tuning in story.tunings.values()))
    title = ", ".join(closures[:3]) + (f" and {len(closures) - 3} more" if len(closures) > 3 else "")
    tunings = list(story.tunings.values())
    if len(tunings) == 1:
        return Headline(title, (*_machine(story), *told(tunings[0]).items()))
    named = tuple((shortened(story.name_of(each), 80), each) for each in tunings[:_MAX_TUNINGS] if told(each))
    words = [(name, "; ".join(f"{what} {text}" for what, text in told(each).items())) for name, each in named]
    return Headline(title, (*_machine(story), *words), named)


def _machine(story: Story) -> list[tuple[str, str]]:
    if story.runs:
        run = story.runs[min(story.runs)]
        hosts = len({each.host for each in story.runs.values()})
        devices = ", ".join(dict.fromkeys(each.device for each in story.runs.values()))
        ranks = f"{run.world_size} rank{'s' * (run.world_size != 1)} on {hosts} host{'s' * (hosts != 1)}, {devices}"
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        return [
            ("begun", run.date),
            ("ranks", ranks),
            ("versions", versions),
            ("command", " ".join([Path(run.command[0]).name, *run.command[1:]] if run.command else [])),
        ]
    records = [site.record for _, site in story.sites if site.record is not None]
    if not records:
        return []
    where = records[0].environment
    newest = max(record.tuned_at for record in records)
    versions = f"python {where.python}, torch {where.torch}, triton {where.triton}, cuda {where.cuda or 'none'}"
    n_others = len({record.environment for record in records}) - 1
    ranks = f"{where.world_size} rank{'s' * (where.world_size != 1)}, {where.device}" + f", and {n_others} other machines" * bool(n_others)
    return [("tuned", f"{newest.astimezone(UTC):%Y-%m-%d %H:%M} UTC"), ("ranks", ranks), ("versions", versions)]


def told(tuning: TuningStory) -> dict[str, str]:
    """Steps and seconds of a tuning in words."""
    told = {}
    if tuning.first_ms and tuning.best_ms:
        steps = f"{tuning.first_ms:.4g} ms with the first configs, {tuning.best_ms:.4g} ms with the winners"
        told["step"] = f"{steps}: {tuning.first_ms / tuning.best_ms:.2f}x"
    phases = facts.phase_seconds(tuning.seconds)
    if phases:
        total = tuning.seconds.get("total") or sum(phases.values())
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
        told["took"] = f"{total:.1f} s ({parts}), {tuning.n_replays} replay{'s' * (tuning.n_replays != 1)}"
    if tuning.seconds.get("meetings"):
        told["meetings"] = f"{tuning.seconds['meetings']:.2f} s, a part of the phases"
    return told


def overview(story: Story) -> list[Row]:
    """A row for each site, in the order of ``story.sites``."""
    rows: list[Row] = []
    for tuning in story.tunings.values():
        name = story.name_of(tuning) if len(story.tunings) > 1 else ""
        for label, text in tuning.site_names.items():
            rows.append(replace(_row(len(rows) + 1, tuning, tuning.sites[label]), label=text, tuning=name))
    return rows


def _row(number: int, tuning: TuningStory, site: SiteStory) -> Row:
    row = Row(number, site.label, tuning.closure, n_pruned=site.n_pruned, record_id=site.won.record_id if site.won else "")
    record = site.record
    if record is None:
        return replace(row, **_so_far(site))
    drag, ratio = skew(record), gain(record)
    return replace(
        row,
        winner=short_config(record.best),
        ms=record.best.latency_ms,
        gain=ratio,
        gain_words=gain_words(ratio, f"{record.candidates[0].latency_ms:.4g} ms") if ratio is not None else "",
        gain_text=_gain_text(record),
        first_ms=record.candidates[0].latency_ms,
        confidence=facts.confidence(record),
        reason=facts.reason(site),
        outcomes=fates(record).text,
        slowest_rank=f"rank {drag[0]} ({100 * drag[1]:+.1f} %)" if drag else "",
    )


def _gain_text(record: TuningRecord) -> str:
    if (ratio := gain(record)) is not None:
        return f"{ratio:.2f}x"
    return "first config fails" if record.candidates[0].failure is not None else ""


def messages(story: Story, limit: int) -> list[str]:
    """Warnings and errors of the log, each once with the ranks that wrote it; at most ``limit`` of them."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for each, text in zip(story.messages, story.for_people(story.messages), strict=True):
        ranks.setdefault((each.level, text), set()).add(each.rank)
    found = []
    for (level, text), writers in list(ranks.items())[:limit]:
        named = ", ".join(map(str, sorted(writers)[:8])) + ", ..." * (len(writers) > 8)
        found.append(f"rank{'s' * (len(writers) > 1)} {named}, {level}: {text}")
    return found


def _so_far(site: SiteStory) -> dict[str, Any]:
    """Of a site that is not settled."""
    outcomes = f"{len(site.configs)} candidates, {len(site.dropped)} cannot run"
    if not site.rungs:
        return {"reason": "not settled", "outcomes": outcomes}
    last = site.rungs[-1]
    return {
        "reason": f"not settled; best so far: {site.config(last.best)}",
        "outcomes": f"{outcomes}, {last.n_left} left in the race",
        "ms": last.best_ms,
    }
