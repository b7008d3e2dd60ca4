"""Charts as PNG files, by matplotlib, which is no dependency of the page itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dist_tune.report.plots.charts import Axis, Bars, Boxes, Chart, Dots, Line, Mark, Words

COLOURS = ("#d9480f", "#2b4c9b", "#2a7fb8", "#35a28f", "#8aa936", "#a9a79c", "#74767d", "#c9cbd1")
"""As the light page."""


class MissingMatplotlibError(RuntimeError):
    """matplotlib is not installed. The message says how to get it."""


def write_pngs(folder: Path, charts: Iterable[tuple[str, Chart]]) -> list[Path]:
    """One file for each chart, named by its prefix and its name.

    Raises:
        MissingMatplotlibError: it cannot be imported.
        OSError: a file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingMatplotlibError(f"a PNG of each plot needs matplotlib ({error}): pip install 'dist-tune[report]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for prefix, chart in charts:
        figure = Figure(figsize=(9.5 if chart.is_wide else 5.5, chart.height / 62), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(_verbatim(chart.title), fontsize=10)
        _set_axis(axes.xaxis, axes.set_xscale, axes.set_xlim, chart.x)
        _set_axis(axes.yaxis, axes.set_yscale, axes.set_ylim, chart.y)
        for mark in chart.marks:
            _draw(axes, mark)
        if any(mark.name for mark in chart.marks):
            axes.legend(fontsize=7, loc="best")
        path = folder / f"{prefix}-{chart.name}.png"
        figure.savefig(path, dpi=140)
        written.append(path)
    return written


def _set_axis(axis: Any, set_scale: Any, set_limits: Any, values: Axis) -> None:
    set_scale("log" if values.is_log else "linear")
    set_limits(values.low, values.high)
    axis.set_label_text(_verbatim(values.label))
    axis.set_ticks([tick for tick, _ in values.ticks], [_verbatim(text) for _, text in values.ticks], fontsize=7)
    axis.set_ticks([], minor=True)
    if values.has_grid:
        axis.grid(alpha=0.3)


def _verbatim(text: str) -> str:
    return text.replace("$", r"\$")  # no mathematics


def _draw(axes: Any, mark: Mark) -> None:
    colour = COLOURS[mark.colour]
    label = _verbatim(mark.name) or None
    if isinstance(mark, Dots):
        axes.scatter(*zip(*mark.points, strict=True), s=36 if mark.is_large else 9, color=colour, label=label, zorder=3)
    elif isinstance(mark, Bars):
        axes.vlines(*zip(*mark.spans, strict=True), color=colour, label=label, linewidth=1)
    elif isinstance(mark, Line):
        axes.plot(*zip(*mark.points, strict=True), color=colour, label=label, linewidth=1.2)
    elif isinstance(mark, Boxes):
        x0, x1, y0, y1 = (list(values) for values in zip(*mark.boxes, strict=True))
        sizes = [b - a for a, b in zip(y0, y1, strict=True)], [b - a for a, b in zip(x0, x1, strict=True)]
        axes.barh(y0, sizes[1], sizes[0], x0, align="edge", color=colour, label=label, alpha=mark.strength)
    elif isinstance(mark, Words):
        for x, y, text in mark.texts:
            axes.text(x, y, _verbatim(text), ha="center", va="center", fontsize=7)
