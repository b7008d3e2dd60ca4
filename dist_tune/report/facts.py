"""Facts of a story that the page, the text and the JSON document show alike: its head, a row for each site, what decided. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC
from math import log
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from dist_tune.cache import CandidateRecord, TuningRecord, differing, fates, gain, lead, short_config, skew
from dist_tune.output import amount, events, gain_words, lead_words
from dist_tune.report.story import PHASES, SiteStory, Story, TuningStory, numbers, shortened

_MAX_TUNINGS = 60
"""In the head."""
_MAX_VALUES = 40
"""A parameter with more values explains nothing that a reader could use."""


def title(story: Story) -> str:
    """The names of the first three closures, and how many more there are."""
    closures = list(dict.fromkeys(shortened(tuning.title, 80) for tuning in story.tunings.values()))
    return ", ".join(closures[:3]) + f" and {len(closures) - 3} more" * (len(closures) > 3)


def named_tunings(story: Story) -> list[tuple[str, TuningStory]]:
    """The tunings that say something of themselves, with names that tell them apart."""
    return [(shortened(story.name_of(each), 80), each) for each in list(story.tunings.values())[:_MAX_TUNINGS] if told(each)]


def head(story: Story) -> dict[str, str]:
    """Machine and versions, then steps and seconds of the tuning; of several tunings a line each."""
    if len(story.tunings) == 1:
        return machine(story) | told(next(iter(story.tunings.values())))
    lines = {name: "; ".join(f"{what} {text}" for what, text in told(each).items()) for name, each in named_tunings(story)}
    return machine(story) | lines


def machine(story: Story) -> dict[str, str]:
    """Ranks, devices and versions, from headers of events or from records."""
    if story.runs:
        run = story.runs[min(story.runs)]
        hosts = len({each.host for each in story.runs.values()})
        devices = ", ".join(dict.fromkeys(each.device for each in story.runs.values()))
        return {
            "begun": run.date,
            "ranks": f"{amount(run.world_size, 'rank')} on {amount(hosts, 'host')}, {devices}",
            "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
            "command": " ".join([Path(run.command[0]).name, *run.command[1:]] if run.command else []),
        }
    records = [site.record for _, site in story.sites if site.record is not None]
    if not records:
        return {}
    where, n_others = records[0].environment, len({record.environment for record in records}) - 1
    return {
        "tuned": f"{max(record.tuned_at for record in records).astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        "ranks": f"{amount(where.world_size, 'rank')}, {where.device}" + f", and {n_others} other machines" * bool(n_others),
        "versions": f"python {where.python}, torch {where.torch}, triton {where.triton}, cuda {where.cuda or 'none'}",
    }


def told(tuning: TuningStory) -> dict[str, str]:
    """Steps and seconds of a tuning in words."""
    found = {}
    if tuning.first_ms and tuning.best_ms:
        steps = f"{tuning.first_ms:.4g} ms with the first configs, {tuning.best_ms:.4g} ms with the winners"
        found["step"] = f"{steps}: {tuning.first_ms / tuning.best_ms:.2f}x"
    if phases := {name: tuning.seconds[name] for name in PHASES if tuning.seconds.get(name)}:
        total = tuning.seconds.get("total") or sum(phases.values())
        if (rest := total - sum(phases.values())) > 0.005:
            phases["other"] = rest
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
        found["took"] = f"{total:.1f} s ({parts}), {amount(tuning.n_replays, 'replay')}"
    if tuning.seconds.get("meetings"):
        found["meetings"] = f"{tuning.seconds['meetings']:.2f} s, a part of the phases"
    return found


def stragglers(tuning: TuningStory) -> str:
    """Ranks that came last to meetings: "rank 3 (9 of 12 meetings, the others waited 1.2 s)"; empty for a single rank.

    By durations alone: who waits least at a meeting came last. Clocks of different hosts are never compared. The wait is the mean
    of the other ranks', added over the meetings to which the rank came last.
    """
    ranks = [(rank.rank, [each.seconds for each in rank.meetings]) for rank in tuning.ranks.values() if rank.meetings]
    n_meetings = min((len(seconds) for _, seconds in ranks), default=0)
    n_last, waited_s = Counter[int](), defaultdict[int, float](float)
    for k in range(n_meetings if len(ranks) > 1 else 0):
        (least_s, last), *others = sorted((seconds[k], rank) for rank, seconds in ranks)
        n_last[last] += 1
        waited_s[last] += fmean(seconds for seconds, _ in others) - least_s
    worst = sorted((each for each in waited_s.items() if each[1] >= 0.001), key=lambda each: -each[1])[:4]
    return ", ".join(f"rank {rank} ({n_last[rank]} of {n_meetings} meetings, the others waited {s:.3g} s)" for rank, s in worst)


def messages(told: Sequence[events.Told], story: Story, limit: int) -> list[str]:
    """Lines of the log, each once with the ranks that wrote it, and with names of sites in place of labels; at most ``limit``."""
    names = {f"site={label}": name for tuning in story.tunings.values() for label, name in tuning.site_names.items()}
    ranks = defaultdict[tuple[str, str], set[int]](set)
    for each in told:
        text = each.text
        for label in sorted(names, key=len, reverse=True) if "site=" in text else ():  # one label may begin with another
            text = text.replace(label, names[label])
        ranks[each.level, text].add(each.rank)
    found = list(ranks.items())[:limit]
    return [f"rank{'s' * (len(writers) > 1)} {numbers(writers)}, {level}: {text}" for (level, text), writers in found]


def summary(story: Story) -> dict[str, Any]:
    """All of it for programs: a JSON document."""
    return {"title": title(story), "facts": head(story), "notes": story.damage + story.notes, "sites": rows(story)}


def rows(story: Story) -> list[dict[str, Any]]:
    """A row for each site, in the order of ``story.sites``. Texts are empty, and numbers None, where the story does not tell them."""
    found: list[dict[str, Any]] = []
    for tuning in story.tunings.values():
        of = {"closure": tuning.closure, "tuning": story.name_of(tuning) if len(story.tunings) > 1 else ""}
        found += [{"label": name, **of, **_row(tuning.sites[label])} for label, name in tuning.site_names.items()]
    return [{"number": k, **row} for k, row in enumerate(found, 1)]


def _row(site: SiteStory) -> dict[str, Any]:
    record, won = site.record, site.won
    row: dict[str, Any] = dict.fromkeys(("winner", "gain_text", "gain_words", "confidence", "slowest_rank"), "")
    row |= {"explained": {name: round(part, 4) for name, part in parameters(record).items()}}
    row |= {"n_pruned": site.met.n_pruned, "record_id": won.record_id if won else "", "ms": None, "gain": None, "first_ms": None}
    if record is None:
        so_far = f", {site.rungs[-1].n_left} left in the race" if site.rungs else ""
        best = f"; best so far: {site.config(site.rungs[-1].best)}" if site.rungs else ""
        outcomes = f"{len(site.met.configs)} candidates, {len(site.dropped)} cannot run{so_far}"
        return row | {"ms": site.rungs[-1].best_ms if site.rungs else None, "reason": f"not settled{best}", "outcomes": outcomes}
    first, drag, ratio = record.candidates[0], skew(record), gain(record)
    return row | {
        "winner": short_config(record.best),
        "ms": record.best.latency_ms,
        "gain": ratio,
        "gain_text": "first config fails" * (first.failure is not None) if ratio is None else f"{ratio:.2f}x",
        "gain_words": "" if ratio is None else gain_words(ratio, f"{first.latency_ms:.4g} ms"),
        "first_ms": first.latency_ms,
        "confidence": confidence(record),
        "reason": (won.reason if won else "") or record.reason,
        "outcomes": fates(record).text,
        "slowest_rank": f"rank {drag[0]} ({100 * drag[1]:+.1f} %)" if drag else "",
    }


def confidence(record: TuningRecord) -> str:
    """The lead over the fastest other kernel, beside the noise: "2.1 % ahead of the next kernel, 3.0 x the noise".

    Noise: the ``spread_ms`` of both, added, as a share of the winner's time.
    """
    if (ahead := lead(record)) is None:
        return "nothing to compare with"
    rival = min(timed(record, but=record.winner), key=lambda each: each.latency_ms or 0.0, default=record.best)
    noise = ((record.best.spread_ms or 0.0) + (rival.spread_ms or 0.0)) / (record.best.latency_ms or 1.0)
    words = f"{lead_words(ahead).removesuffix(' kernel')} kernel"
    if abs(ahead) <= noise:
        return f"{words}, within the noise ({100 * noise:.1f} %)"
    return f"{words}, {abs(ahead) / noise:.1f} x the noise" if noise else words


def timed(record: TuningRecord, but: int | None = None) -> list[CandidateRecord]:
    """Candidates with a time, except those that are the same kernel as another."""
    return [each for each in record.candidates if each.latency_ms and each.failure is None and each.equal_to is None and each.index != but]


def parameters(record: TuningRecord | None) -> dict[str, float]:
    """Fields of the configs with at least two values -> part of the variance of the log times that each explains alone, largest first.

    Epsilon squared of a one-way analysis of variance, from 0 to 1: less what chance would explain.
    """
    found = {}
    for name in differing(record.candidates) if record else ():
        groups = defaultdict[str, list[float]](list)
        for each in timed(record) if record else ():
            groups[str(each.fields.get(name, "-"))].append(log(each.latency_ms or 1.0))
        n_all, n_groups = sum(map(len, groups.values())), len(groups)
        if not 2 <= n_groups <= _MAX_VALUES:
            continue
        total = pvariance([value for group in groups.values() for value in group]) * n_all
        within = sum(pvariance(group) * len(group) for group in groups.values())
        is_known = total > 0 and n_all > n_groups
        found[name] = max(0.0, 1.0 - (within / (n_all - n_groups)) / (total / (n_all - 1))) if is_known else 0.0
    return dict(sorted(found.items(), key=lambda each: -each[1]))
