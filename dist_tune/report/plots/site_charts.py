"""Charts of one settled site. Pure."""

from __future__ import annotations

from math import log

from dist_tune.cache import CandidateRecord, TuningRecord
from dist_tune.report.facts import FATES, fate
from dist_tune.report.importance import Parameter, parameters, timed, value_of
from dist_tune.report.plots.charts import Bars, Boxes, Chart, Dots, Line, Mark, Words, categories, linear, number, times

MAX_PLOTS = 8
"""Of parameters; those that explain least have none."""
_TIME = "time (ms)"
_OTHERS, _BEST = 6, 1
"""Colours of candidates and of the best among them; the winner's is 0."""


def site_charts(record: TuningRecord) -> list[Chart]:
    """All charts for which the record has something to show."""
    candidates = timed(record)
    if len(candidates) < 2:
        return []
    found = parameters(record)
    charts = [sorted_times(record), *(parameter_plot(record, each) for each in found[:MAX_PLOTS])]
    if len(found) >= 2:
        charts.insert(1, heat_map(record, found[0], found[1]))
    return charts + resource_plots(record)


def sorted_times(record: TuningRecord) -> Chart:
    """Candidates from fastest to slowest, with the spread over ranks and the rung at which each left."""
    candidates = sorted(timed(record), key=lambda each: each.latency_ms or 0.0)
    place = {each.index: float(k + 1) for k, each in enumerate(candidates)}
    spreads = {
        each.index: (min(each.rank_latencies_ms.values()), max(each.rank_latencies_ms.values()))
        for each in candidates
        if each.rank_latencies_ms
    }
    marks: list[Mark] = []
    bars = tuple((place[index], low, high) for index, (low, high) in spreads.items() if high > low)
    for colour, name in enumerate(FATES[:-2]):
        points = tuple((place[each.index], each.latency_ms or 0.0) for each in candidates if fate(record, each) == name)
        if points:
            marks.append(Dots(name, colour, points, is_large=name == "winner"))
    if bars:
        marks.append(Bars("fastest to slowest rank", 6, bars))
    every = [each.latency_ms or 0.0 for each in candidates] + [end for pair in spreads.values() for end in pair]
    n_others = len(record.candidates) - len(candidates)
    note = f"The table has the other candidates, too: {n_others} without a time of their own." if n_others else ""
    x = linear("place, from fastest to slowest", 0.0, len(candidates) + 1.0, 8, is_tight=True)
    y = times(f"slowest rank's {_TIME}", every)
    return Chart("times", "Candidates by time, with the rung at which each left", x, y, tuple(marks), True, 280, note)


def parameter_plot(record: TuningRecord, parameter: Parameter) -> Chart:
    """Times by the value of one parameter, with the best of each value."""
    place = {value: float(k) for k, value in enumerate(parameter.values)}
    candidates = timed(record)
    # Side by side, because points of one value would lie on one line: by index, which is as good as chance and the same at each run.
    points = tuple(
        (place[value_of(each, parameter.name)] + ((each.index * 37) % 21 - 10) / 40, each.latency_ms or 0.0) for each in candidates
    )
    best = {
        value: min(each.latency_ms or 0.0 for each in candidates if value_of(each, parameter.name) == value) for value in parameter.values
    }
    marks = (
        Dots("", _OTHERS, points),
        Line("best of each value", _BEST, tuple((place[value], best_ms) for value, best_ms in best.items())),
        *_winner(record, place[value_of(record.best, parameter.name)] if record.best.latency_ms else None),
    )
    x = categories(parameter.name, parameter.values)
    title = f"{parameter.name}: explains {100 * parameter.explained:.0f} % of the variance"
    return Chart(f"parameter-{_slug(parameter.name)}", title, x, times(_TIME, [y for _, y in points]), marks)


def _winner(record: TuningRecord, x: float | None) -> tuple[Mark, ...]:
    return (Dots("winner", 0, ((x, record.best.latency_ms or 0.0),), is_large=True),) if x is not None and record.best.latency_ms else ()


def heat_map(record: TuningRecord, across: Parameter, up: Parameter) -> Chart:
    """Best time of each pair of values of the two parameters that explain most."""
    best: dict[tuple[str, str], float] = {}
    for each in timed(record):
        cell = value_of(each, across.name), value_of(each, up.name)
        best[cell] = min(each.latency_ms or 0.0, best.get(cell, float("inf")))
    low, high = log(min(best.values())), log(max(best.values()))
    marks: list[Mark] = []
    texts = []
    for (a, b), best_ms in sorted(best.items()):
        x, y = across.values.index(a), up.values.index(b)
        strength = 0.06 + 0.64 * ((high - log(best_ms)) / (high - low) if high > low else 1.0)
        marks.append(Boxes("", _BEST, ((x - 0.48, x + 0.48, y - 0.47, y + 0.47),), round(strength, 2)))
        texts.append((float(x), float(y), number(float(f"{best_ms:.3g}"))))
    if len(across.values) <= 8:
        marks.append(Words(tuple(texts)))
    x_axis, y_axis = categories(across.name, across.values), categories(up.name, up.values)
    title = f"Best time (ms) over {across.name} and {up.name}"
    note = "The two parameters that explain most; the stronger the blue, the faster. Empty cells: nothing with these values has a time."
    return Chart("heat-map", title, x_axis, y_axis, tuple(marks), height=max(230, min(420, 70 + 26 * len(up.values))), note=note)


def resource_plots(record: TuningRecord) -> list[Chart]:
    """Registers, spills and shared memory against time."""

    def plot(name: str, label: str, values: dict[int, float]) -> list[Chart]:
        candidates = [each for each in timed(record) if each.index in values]
        if len(candidates) < 2 or not any(values.values()):
            return []
        points = tuple((values[each.index], each.latency_ms or 0.0) for each in candidates)
        winner = _winner(record, values.get(record.winner))
        x = linear(label, 0.0, max(values.values()))
        return [
            Chart(
                name,
                f"{label[0].upper()}{label[1:]} and time",
                x,
                times(_TIME, [y for _, y in points]),
                (Dots("", _OTHERS, points), *winner),
            )
        ]

    def known(name: str, divisor: float = 1.0) -> dict[int, float]:
        found: list[tuple[CandidateRecord, float | None]] = [(each, getattr(each, name)) for each in timed(record)]
        return {each.index: value / divisor for each, value in found if value is not None}

    return [
        *plot("registers", "registers of a thread", known("n_regs")),
        *plot("spills", "spilled registers of a thread", known("n_spills")),
        *plot("shared-memory", "shared memory (KiB)", known("shared_bytes", 1024.0)),
    ]


def _slug(name: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else "-" for char in name)[:40].lower()
