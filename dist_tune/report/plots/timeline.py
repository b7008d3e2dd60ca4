"""Charts of a tuning: its time line by rank, its seconds by phase, the step before and after. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dist_tune.report.facts import PHASES, phase_seconds, stragglers
from dist_tune.report.plots.charts import Axis, Boxes, Chart, Mark, Words, linear, number
from dist_tune.report.story import RankStory, Span, TuningStory

MAX_RANKS = 16
"""In a time line: those that the others waited for longest."""
_LANES = ("phases", "compiling", "replays", "meetings")
_COLOUR = {name: number for number, name in enumerate(PHASES, 1)} | {"compiling": 2, "replays": 6, "meetings": 0}
_PIXELS = 700.0
_BEFORE = "With the first configs: the step with the winners, and what each first config that left in the race adds by its kernel's time."


def tuning_charts(tuning: TuningStory) -> list[Chart]:
    """All charts for which the tuning has something to show."""
    charts = []
    ranks = shown_ranks(tuning)
    if ranks:
        charts.append(time_line(tuning, ranks))
    if len(phases := phase_seconds(tuning.seconds)) > 1:
        charts.append(bars("phases", "Seconds by phase", "seconds", phases))
    if tuning.first_ms and tuning.best_ms:
        steps = {"first configs": tuning.first_ms, "winners": tuning.best_ms}
        charts.append(bars("step", "Step before and after", "time of a step (ms)", steps, _BEFORE))
    return charts


def shown_ranks(tuning: TuningStory) -> list[RankStory]:
    """Ranks with phases, at most ``MAX_RANKS`` of them, in order."""
    with_phases = [rank for rank in tuning.ranks.values() if rank.phases]
    late = {each.rank: each.waited_s for each in stragglers(tuning)}
    chosen = sorted(with_phases, key=lambda rank: (-late.get(rank.rank, 0.0), rank.rank))[:MAX_RANKS]
    return sorted(chosen, key=lambda rank: rank.rank)


def time_line(tuning: TuningStory, ranks: list[RankStory]) -> Chart:
    """Four lanes for each rank. Each rank's time begins with its first event, because clocks of hosts differ."""
    length_s = max(rank.last_at - rank.begun_at for rank in ranks) or 1.0
    spans: dict[str, list[tuple[float, float, float, float]]] = {}
    ticks = []
    late = {each.rank: each for each in stragglers(tuning)}
    worst = max(late.values(), key=lambda each: each.waited_s, default=None)
    all_lanes = [_lanes(rank) for rank in ranks]
    shown = [lane for lane in _LANES if lane == "phases" or any(lanes[lane] for lanes in all_lanes)]
    for k, (rank, lanes) in enumerate(zip(ranks, all_lanes, strict=True)):
        is_worst = worst is not None and worst.rank == rank.rank and worst.waited_s > 0.01
        for row, lane in enumerate(shown):
            y = -(k * (len(shown) + 0.6) + row)
            ticks.append((y, f"rank {rank.rank}{' (last)' * is_worst}" if row == 0 else lane))
            for name, begin, end in merged(lanes[lane], length_s / _PIXELS, by_name=row == 0):
                box = (begin - rank.begun_at, max(end, begin + length_s / _PIXELS / 2) - rank.begun_at, y - 0.4, y + 0.4)
                spans.setdefault(name if row == 0 else lane, []).append(box)
    x = linear("seconds since the rank's tuning began", 0.0, length_s, 8, is_tight=True)
    y_axis = Axis("", ticks[-1][0] - 0.8, 0.8, tuple(ticks), has_grid=False)
    # The axis names the lanes.
    marks: list[Mark] = [
        Boxes(name if name in PHASES else "", colour, tuple(spans[name])) for name, colour in _COLOUR.items() if name in spans
    ]
    note = (
        f"{len(ranks)} of {len(tuning.ranks)} ranks: those for which the others waited longest. " if len(ranks) < len(tuning.ranks) else ""
    )
    note += f"Ranks that came last to meetings: {words}." if (words := straggler_words(tuning)) else ""
    return Chart("time-line", "Time line by rank", x, y_axis, tuple(marks), True, max(160, 80 + 13 * len(ticks)), note)


def _lanes(rank: RankStory) -> dict[str, list[Span]]:
    return dict(zip(_LANES, (rank.phase_spans(), rank.compiles, rank.replays, rank.meetings), strict=True))


def straggler_words(tuning: TuningStory) -> str:
    """As in "rank 3 (9 of 12 meetings, the others waited 1.2 s)"; empty for a single rank."""
    found = [each for each in stragglers(tuning) if each.waited_s >= 0.001][:4]
    return ", ".join(
        f"rank {each.rank} ({each.n_last} of {each.n_meetings} meetings, the others waited {each.waited_s:.3g} s)" for each in found
    )


def merged(spans: Iterable[Span], gap_s: float, *, by_name: bool = False) -> list[tuple[str, float, float]]:
    """Spans of one lane as few as the eye can tell apart: those closer than ``gap_s`` become one."""
    found: list[tuple[str, float, float]] = []
    for span in sorted(spans):
        if found and span.begin - found[-1][2] < gap_s and (not by_name or found[-1][0] == span.name):
            found[-1] = (found[-1][0], found[-1][1], max(found[-1][2], span.end))
        else:
            found.append((span.name, span.begin, span.end))
    return found


def bars(name: str, title: str, label: str, values: dict[str, float], note: str = "") -> Chart:
    """Horizontal bars, the first at the top, each with its number."""
    ticks = tuple((-float(k), text) for k, text in enumerate(values))
    boxes = tuple((0.0, value, -k - 0.35, -k + 0.35) for k, value in enumerate(values.values()))
    axis = linear(label, 0.0, max(values.values()) * 1.18, 4)
    room = axis.high * 0.09
    texts = tuple((value + room, -float(k), number(round(value, 4))) for k, value in enumerate(values.values()))
    y = Axis("", 0.6 - len(values), 0.6, ticks, has_grid=False)
    return Chart(name, title, axis, y, (Boxes("", 1, boxes), Words(texts)), height=74 + 26 * len(values), note=note)
