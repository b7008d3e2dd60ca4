"""Figures about settled sites and tunings: gain, lead, noise, fates of candidates, stragglers. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from dist_tune.cache import CandidateRecord, TuningRecord
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


def why_left(record: TuningRecord, each: CandidateRecord) -> str:
    """The reason in the record's words."""
    if each.index == record.winner:
        return "winner"
    equal = f"the same kernel as {each.equal_to}" if each.equal_to is not None else ""
    reason = each.failure if each.failure is not None else each.left
    return "; ".join(filter(None, (reason, equal))) or "in the finals to the end"


def outcomes(record: TuningRecord) -> str:
    """Numbers of candidates by fate: "216 tried: 4 to the end, 144 raced out, 68 cannot run"."""
    count = Counter(fate(record, each) for each in record.candidates)
    n_out = sum(count[name] for name in FATES if name.startswith("left"))
    parts = {"to the end": count["winner"] + count["to the end"], "raced out": n_out, "not raced": count["not raced"]}
    parts["cannot run"] = count["dropped"]
    return f"{len(record.candidates)} candidates: " + ", ".join(f"{n} {name}" for name, n in parts.items() if n)


def first_ms(record: TuningRecord) -> float | None:
    """Time of the first config that runs, which a user without a tuner would have: the base of the gain."""
    return next((each.latency_ms for each in record.candidates if each.failure is None and each.latency_ms), None)


def gain(record: TuningRecord) -> float | None:
    """Times as fast as the first config that runs."""
    first, best = first_ms(record), record.best.latency_ms
    return first / best if first and best else None


class Lead(NamedTuple):
    """Distance of the winner from the next candidate."""

    share: float
    """Of the winner's time; negative where the next one's kernel is faster, and the step or the noise decided."""
    noise: float
    """Of the same unit: the spreads of both, added."""

    @property
    def words(self) -> str:
        """As in "2.1 % ahead of the next, 3 x the noise"."""
        if abs(self.share) <= self.noise:
            return f"tied with the next within the noise ({100 * self.share:+.1f} %, noise {100 * self.noise:.1f} %)"
        if self.share < 0:
            return f"kernel {-100 * self.share:.1f} % behind the fastest, chosen by the step"
        times = f", {self.share / self.noise:.1f} x the noise" if self.noise else ""
        return f"{100 * self.share:.1f} % ahead of the next{times}"


def lead(record: TuningRecord) -> Lead | None:
    """The winner's lead over the fastest of the others; None for one that is alone."""
    best = record.best
    others = [
        each for each in record.candidates
        if each.index != best.index and each.failure is None and each.latency_ms and each.equal_to is None and best.equal_to is None
    ]  # fmt: skip
    if not others or not best.latency_ms:
        return None
    rival = min(others, key=lambda each: each.latency_ms or 0.0)
    noise = (best.spread_ms or 0.0) + (rival.spread_ms or 0.0)
    return Lead((rival.latency_ms or 0.0) / best.latency_ms - 1.0, noise / best.latency_ms)


def reason(site: SiteStory) -> str:
    """Reason of the choice in words."""
    if site.won is not None and site.won.reason:
        return site.won.reason
    record = site.record
    if record is None:
        return ""
    ahead = lead(record)
    if ahead is None:
        return "only one that runs" if sum(each.failure is None for each in record.candidates) == 1 else ""
    return ahead.words


class Skew(NamedTuple):
    """The slowest rank at a site, against the fastest."""

    rank: int
    share: float


def skew(record: TuningRecord) -> Skew | None:
    """Of the winner; None for a single rank."""
    times = record.best.rank_latencies_ms
    slowest = max(times, key=times.__getitem__, default=None)
    if slowest is None or len(times) < 2 or min(times.values()) <= 0:
        return None
    return Skew(slowest, times[slowest] / min(times.values()) - 1.0)


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
