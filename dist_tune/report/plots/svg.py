"""Charts as coordinates of an SVG, which the page's template writes out. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dist_tune.report.plots.charts import Bars, Boxes, Chart, Dots, Line, Mark, Words

_NARROW, _WIDE = 360, 900
_RIGHT = 12
_CHAR = 6.3
"""Pixels of a character of an axis."""
_Place = Callable[[float, float], tuple[float, float]]


class Layer(NamedTuple):
    """The marks of one kind in one colour, as one path: thousands of elements of their own would make the page ten times as large."""

    style: str
    """CSS class: dots, large, bars, boxes or line."""
    colour: int
    path: str
    strength: float


class Text(NamedTuple):
    """A text and where it stands."""

    x: float
    y: float
    text: str


class Drawing(NamedTuple):
    """All that the template needs of a chart."""

    title: str
    note: str
    is_wide: bool
    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_label: str
    y_label: str
    x_ticks: list[Text]
    y_ticks: list[Text]
    has_x_grid: bool
    has_y_grid: bool
    layers: list[Layer]
    words: list[Text]
    legend: list[tuple[int, str]]


def draw(chart: Chart) -> Drawing:
    """The chart at its natural size in pixels."""
    width = _WIDE if chart.is_wide else _NARROW
    left = 14 + _CHAR * max((len(text) for _, text in chart.y.ticks), default=1)
    right, bottom = width - _RIGHT, chart.height - 40
    top = 26 if chart.y.label else 8

    def at(x: float, y: float) -> tuple[float, float]:
        return round(left + chart.x.at(x) * (right - left), 1), round(bottom - chart.y.at(y) * (bottom - top), 1)

    layers = [Layer(_style(mark), mark.colour, path, getattr(mark, "strength", 1.0)) for mark in chart.marks if (path := _path(mark, at))]
    words = [Text(*at(x, y), text) for mark in chart.marks if isinstance(mark, Words) for x, y, text in mark.texts]
    return Drawing(
        chart.title, chart.note, chart.is_wide, width, chart.height, round(left, 1), right, top, bottom, chart.x.label, chart.y.label,
        [Text(at(value, chart.y.low)[0], bottom, text) for value, text in chart.x.ticks],
        [Text(left, at(chart.x.low, value)[1], text) for value, text in chart.y.ticks],
        chart.x.has_grid, chart.y.has_grid, layers, words, [(mark.colour, mark.name) for mark in chart.marks if mark.name],
    )  # fmt: skip


def _style(mark: Mark) -> str:
    if isinstance(mark, Dots):
        return "large" if mark.is_large else "dots"
    return type(mark).__name__.lower()


def _path(mark: Mark, at: _Place) -> str:
    if isinstance(mark, Dots):  # lines of no length with round ends
        return "".join("M{:g} {:g}h0".format(*at(x, y)) for x, y in mark.points)
    if isinstance(mark, Bars):
        return "".join("M{:g} {:g}V{:g}".format(*at(x, low), at(x, high)[1]) for x, low, high in mark.spans)
    if isinstance(mark, Line):
        return "M" + "L".join("{:g} {:g}".format(*at(x, y)) for x, y in mark.points)
    if isinstance(mark, Boxes):
        return "".join(_box(at(x0, y0), at(x1, y1)) for x0, x1, y0, y1 in mark.boxes)
    return ""


def _box(low: tuple[float, float], high: tuple[float, float]) -> str:
    return f"M{low[0]:g} {high[1]:g}H{max(high[0], low[0] + 0.5):g}V{low[1]:g}H{low[0]:g}z"
