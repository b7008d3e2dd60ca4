"""Figures about settled sites and tunings that a record's own account does not give: noise, fates as classes, stragglers, phases. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from dist_tune.cache import CandidateRecord, TuningRecord, lead
from dist_tune.output import lead_words
from dist_tune.report.story import SiteStory, TuningStory

_RUNG = re.compile(r"left the race after rung (\d+)")
FATES = ("winner", "to the end", "left the finals", "left rung 2 or later", "left rung 1", "left rung 0", "not raced", "dropped")
"""How far a candidate came, from the farthest on."""


def fate(record: TuningRecord, each: CandidateRecord) -> str:
    """One of ``FATES``."""
    if each.index == record.winner:
        return "winner"
    if each.failure is not None:
        return "dropped"
    if each.latency_ms is None:
        return "not raced"
    if not each.left:
        return "to the end"
    if rung := _RUNG.search(each.left):
        return f"left rung {rung[1]}" if int(rung[1]) < 2 else FATES[3]
    return "left the finals" if "finals" in each.left else FATES[3]


def reason(site: SiteStory) -> str:
    """Reason of the choice in words; empty for a site that is not settled."""
    told = site.won.reason if site.won is not None else ""
    return told or (site.record.reason if site.record is not None else "")


def noise(record: TuningRecord) -> float:
    """The ``spread_ms`` of the winner and of the fastest other candidate, added, as a share of the winner's time."""
    others = [each for each in record.candidates if each.index != record.winner and each.failure is None and each.latency_ms]
    rival = min(others, key=lambda each: each.latency_ms or 0.0, default=record.best)
    return ((record.best.spread_ms or 0.0) + (rival.spread_ms or 0.0)) / (record.best.latency_ms or 1.0)


def confidence(record: TuningRecord) -> str:
    """The lead over the fastest other kernel, beside the noise: "2.1 % ahead of the next kernel, 3.0 x the noise"."""
    ahead, unsure = lead(record), noise(record)
    if ahead is None:
        return "nothing to compare with"
    words = f"{lead_words(ahead).removesuffix(' kernel')} kernel"
    if abs(ahead) <= unsure:
        return f"{words}, within the noise ({100 * unsure:.1f} %)"
    return f"{words}, {abs(ahead) / unsure:.1f} x the noise" if unsure else words


class Straggler(NamedTuple):
    """How often the others waited for a rank at meetings, and how long."""

    rank: int
    n_last: int
    n_meetings: int
    waited_s: float
    """Mean wait of the other ranks, added over the meetings to which this rank came last."""


def stragglers(tuning: TuningStory) -> list[Straggler]:
    """Ranks that came last, those first for which the others waited longest.

    By durations alone: who waits least at a meeting came last. Clocks of different hosts are never compared.
    """
    meetings = {rank: each.meetings for rank, each in tuning.ranks.items() if each.meetings}
    n_meetings = min(map(len, meetings.values()), default=0)
    if len(meetings) < 2:
        return []
    n_last: Counter[int] = Counter()
    waited: dict[int, float] = defaultdict(float)
    for k in range(n_meetings):
        waits = {rank: spans[k].end - spans[k].begin for rank, spans in meetings.items()}
        last = min(waits, key=waits.__getitem__)
        n_last[last] += 1
        waited[last] += max(0.0, fmean(wait for rank, wait in waits.items() if rank != last) - waits[last])
    found = [Straggler(rank, n, n_meetings, waited[rank]) for rank, n in n_last.items()]
    return sorted(found, key=lambda each: -each.waited_s)


PHASES = ("discover", "compile", "race", "finals", "settle")


def phase_seconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """The phases that add up to the total; seconds of none are "other"."""
    parts = {name: seconds[name] for name in PHASES if seconds.get(name)}
    rest = seconds.get("total", 0.0) - sum(parts.values())
    return parts | ({"other": rest} if rest > 0.005 and parts else {})
