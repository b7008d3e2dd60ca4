"""What a tuning told of itself beside what the job's own times say of the same.

Knows lines of text and numbers. Starts nothing, and imports nothing of dist_tune: it looks from
outside. A times file of a rank has a line for each step: its number, the second of its begin, and
where the loss was read the loss and the second at which it was there.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

_STEP = re.compile(r"dist_tune: .*?([\d.,]+)(?: ms)? -> ([\d.,]+) ms")
_CALLS = re.compile(r"tuned in ([\d,]+) calls")
_SHARE = re.compile(r"took (-?[\d.]+) ?% of the job's time")
_SLOWEST = re.compile(r"slowest (?:rank )?(\d+) \(\+?([\d.]+) ?%\)")
_SKIPPED_STEPS = 10
"""At the begin of a job, of whose steps the time is not typical: they compile, and allocate."""


@dataclass(frozen=True)
class Line:
    """A line of the job's stderr."""

    at_s: float
    """By the clock of the times files."""
    text: str


@dataclass(frozen=True)
class Told:
    """What the lines of one job say of its tuning; None for what they do not say."""

    before_ms: float | None = None
    after_ms: float | None = None
    calls: int | None = None
    """Calls of the step that the tuning lasted."""
    calls_at_s: float | None = None
    """When the line with that number came."""
    share: float | None = None
    """Per cent of the job's time that the tuning took."""
    slowest_rank: int | None = None
    slowest: float | None = None
    """Per cent that it is slower than the fastest rank."""
    n_tunings: int = 0
    """Lines that tell of the end of a tuning."""


def told_in(lines: Sequence[Line]) -> Told:
    """What the lines tell of the first tuning that tells of itself."""
    found: dict[str, Any] = {}
    n_tunings = 0
    for line in lines:
        if step := _STEP.search(line.text):
            found.setdefault("before_ms", _number(step[1]))
            found.setdefault("after_ms", _number(step[2]))
        if calls := _CALLS.search(line.text):
            n_tunings += 1
            found.setdefault("calls", int(_number(calls[1])))
            found.setdefault("calls_at_s", line.at_s)
        if share := _SHARE.search(line.text):
            found.setdefault("share", _number(share[1]))
        if slowest := _SLOWEST.search(line.text):
            found.setdefault("slowest_rank", int(slowest[1]))
            found.setdefault("slowest", _number(slowest[2]))
    return Told(**found, n_tunings=n_tunings)


def _number(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))


@dataclass(frozen=True)
class Window:
    """Steps between two readings of the loss, at which the host waits for the device."""

    first: int
    """The first step."""
    last: int
    """The step whose loss was read."""
    ms: float
    """A step."""


@dataclass(frozen=True)
class Times:
    """The times file of one rank."""

    begins_s: Mapping[int, float] = field(default_factory=dict)
    """Step -> its begin."""
    reads_s: Mapping[int, float] = field(default_factory=dict)
    """Step -> when its loss was there."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Step -> its loss, where it was read."""

    @property
    def windows(self) -> list[Window]:
        """In the order of the steps; the first step, which is read by itself, is in none."""
        windows = []
        for (a, a_s), (b, b_s) in pairwise(sorted(self.reads_s.items())):
            windows.append(Window(a + 1, b, 1e3 * (b_s - a_s) / (b - a)))
        return windows

    @property
    def n_steps(self) -> int:
        """Steps that have begun."""
        return max(self.begins_s, default=0)

    def step_at(self, at_s: float) -> int:
        """The step that was the latest to begin at a time; 0 before the first."""
        return max((step for step, s in self.begins_s.items() if s <= at_s), default=0)


def read_times(text: str) -> Times:
    """A times file's content; its last line may be half written."""
    begins_s, reads_s, losses = {}, {}, {}
    for line in text.splitlines():
        words = line.split()
        if len(words) not in (2, 4):
            continue
        step = int(words[0])
        begins_s[step] = float(words[1])
        if len(words) == 4:
            losses[step], reads_s[step] = float(words[2]), float(words[3])
    return Times(begins_s, reads_s, losses)


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step, over windows."""

    median_ms: float
    mean_ms: float
    n_steps: int


def step_time(
    times: Times,
    after: int = _SKIPPED_STEPS,
    until: int | None = None,
) -> StepTime | None:
    """Of the windows that begin after one step and end with another at the latest; None of none."""
    windows = [each for each in times.windows if each.first > after]
    if until is not None:
        windows = [each for each in windows if each.last <= until]
    if not windows:
        return None
    sizes = [each.last - each.first + 1 for each in windows]
    total_ms = sum(each.ms * size for each, size in zip(windows, sizes, strict=True))
    median_ms = statistics.median(each.ms for each in windows)
    return StepTime(median_ms, total_ms / sum(sizes), sum(sizes))


def slowdown(times: Times, tuned_at: int, plain_ms: float) -> float | None:
    """Per cent of the job's time that its tuning took: of the time from the first step's loss on.

    ``tuned_at``: the last step of the tuning. The loss that is read next ends the tuning's time,
    because the host waits there for the device. ``plain_ms``: a step of the job without a tuning.
    """
    ends = [step for step in times.reads_s if step >= max(2, tuned_at)]
    if not ends or 1 not in times.reads_s:
        return None
    end = min(ends)
    wall_ms = 1e3 * (times.reads_s[end] - times.reads_s[1])
    return 100 * (wall_ms - (end - 1) * plain_ms) / wall_ms


_SITE = re.compile(
    r" INFO +site \d+ {2,}(\S.*?) {2,}.*? ms.*? {2,}(\S.*?)(?: {2,}|$)", re.MULTILINE
)
"""A site's line at the end of a tuning: name, times, config, reason."""


def winners_in(log: str) -> dict[str, str]:
    """Kernel and key -> config, of a rank's log; of several tunings the latest."""
    return dict(_SITE.findall(log))


def agreement(ranks: Sequence[Mapping[str, str]]) -> str:
    """Whether ranks have the same configs: "yes, 12 sites", or how many sites differ."""
    if not ranks or not any(ranks):
        return "-"
    shared = set.intersection(*(set(each) for each in ranks))
    alone = set.union(*(set(each) for each in ranks)) - shared
    apart = [each for each in shared if len({rank[each] for rank in ranks}) > 1]
    if not apart and not alone:
        return f"yes, {len(shared)} sites"
    return f"NO: {len(apart)} of {len(shared)} sites differ, {len(alone)} not on all ranks"


@dataclass
class Way:
    """One run of a job."""

    name: str
    ended: str = "not run"
    """"ended", or why it did not end by itself."""
    wall_s: float | None = None
    began_s: float = 0.0
    ranks: list[Times] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    winners: list[dict[str, str]] = field(default_factory=list)
    """Of each rank."""

    @property
    def told(self) -> Told:
        """By its lines."""
        return told_in(self.lines)

    @property
    def tuned_at(self) -> int | None:
        """The step that the first rank was in when the end of its tuning was told."""
        at_s = self.told.calls_at_s
        return self.ranks[0].step_at(at_s) if self.ranks and at_s is not None else None

    @property
    def first_loss_s(self) -> float | None:
        """Seconds from the start of the processes to the first loss."""
        reads = self.ranks[0].reads_s if self.ranks else {}
        return reads[min(reads)] - self.began_s if reads else None

    def steady(self) -> StepTime | None:
        """A step of the first rank once nothing is compiled or tuned any more."""
        if not self.ranks:
            return None
        return step_time(self.ranks[0], max(self.tuned_at or 0, _SKIPPED_STEPS))

    def row(self, n_steps: int = 100) -> dict[str, str]:
        """For the table of a job's ways. ``n_steps``: timed from the start of the processes."""
        steady, last, end_s, step_s = self.steady(), "-", None, None
        if self.ranks and self.ranks[0].losses:
            losses = self.ranks[0].losses
            last = f"{losses[max(losses)]:.4f} at {max(losses)}"
            end_s = self.ranks[0].reads_s.get(n_steps)
        if self.ranks and 1 in self.ranks[0].reads_s:
            step_s = self.ranks[0].reads_s[1] - self.ranks[0].begins_s[1]
        return {
            "way": self.name,
            "first loss, s": _shown(self.first_loss_s, 1),
            "of it step 1": _shown(step_s, 1),
            f"{n_steps} steps, s": _shown(end_s and end_s - self.began_s, 1),
            "job, s": _shown(self.wall_s, 1),
            "steps": str(self.ranks[0].n_steps) if self.ranks else "-",
            "step, ms: median": _shown(steady.median_ms if steady else None, 2),
            "mean": _shown(steady.mean_ms if steady else None, 2),
            "last loss": last,
            "ended": self.ended,
        }

    def facts(self) -> dict[str, Any]:
        """For results.json."""
        steady = self.steady()
        return {
            "ended": self.ended,
            "wall_s": self.wall_s,
            "first_loss_s": self.first_loss_s,
            "steady": asdict(steady) if steady else None,
            "told": asdict(self.told),
            "tuned_at_step": self.tuned_at,
            "windows": [asdict(each) for each in self.ranks[0].windows] if self.ranks else [],
            "losses": dict(self.ranks[0].losses) if self.ranks else {},
            "winners": self.winners,
        }


def told_beside_seen(ways: Mapping[str, Way]) -> list[dict[str, str]]:
    """Rows of what the tuned job told and what was seen from outside; "-" for what is not known."""
    tuned = ways.get("tuned", Way("tuned"))
    first, records = ways.get("first", Way("first")), ways.get("records", Way("records"))
    told, times = tuned.told, tuned.ranks[0] if tuned.ranks else Times()
    at, plain, after = tuned.tuned_at, first.steady(), tuned.steady()
    if at is None:  # what is steady is not known then
        after = None
    during = step_time(times, _SKIPPED_STEPS, at) if at is not None else None
    share = slowdown(times, at, plain.median_ms) if at is not None and plain else None
    at_s = told.calls_at_s - tuned.began_s if told.calls_at_s is not None else None
    told_ratio = seen_ratio = None
    if told.before_ms and told.after_ms:
        told_ratio = told.before_ms / told.after_ms
    if plain and after:
        seen_ratio = plain.median_ms / after.median_ms
    slowest = "-"
    if told.slowest is not None:
        slowest = f"rank {told.slowest_rank}, +{told.slowest:g} %"
    rows = [
        ("step before, ms", _shown(told.before_ms, 3), f"{_both(plain)} (job of first configs)"),
        ("step while tuning, ms", "-", _both(during)),
        ("step after, ms", _shown(told.after_ms, 3), _both(after)),
        ("step with records, ms", "-", _both(records.steady())),
        ("times as fast", _shown(told_ratio, 3), _shown(seen_ratio, 3)),
        ("tuned in calls", _shown(told.calls, 0), f"{_shown(at, 0)} steps, {_shown(at_s, 1)} s"),
        ("% of the job's time", _shown(told.share, 2), _shown(share, 2)),
        ("slowest rank", slowest, _ranks_ms(tuned)),
        ("all ranks have the same configs", "-", agreement(tuned.winners)),
        ("tunings told of", _shown(told.n_tunings, 0), "-"),
    ]
    return [{"": name, "told": text, "seen": seen} for name, text, seen in rows]


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _both(time: StepTime | None) -> str:
    if time is None:
        return "-"
    return f"{time.median_ms:.2f}, mean {time.mean_ms:.2f} of {time.n_steps}"


def _ranks_ms(way: Way) -> str:
    """The step of each rank after the tuning."""
    after = max(way.tuned_at or 0, _SKIPPED_STEPS)
    found = [step_time(each, after) for each in way.ranks]
    return ", ".join(_shown(each.median_ms if each else None, 2) for each in found) or "-"
