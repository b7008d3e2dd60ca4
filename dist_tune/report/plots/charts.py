"""Charts as values: axes, and marks in the units of the axes. Pure; drawn as SVG by ``svg``."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. ``low`` < ``high``, and both above 0 if it is logarithmic."""

    label: str
    """With the unit."""
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False
    has_grid: bool = True

    def at(self, value: float) -> float:
        """Position from 0 to 1."""
        if self.is_log:
            return (log10(max(value, self.low)) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Dots:
    """Points."""

    name: str
    """In the legend; empty for none. So it is with all marks."""
    colour: int
    points: tuple[tuple[float, float], ...]
    is_large: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Vertical lines: x, from, to."""

    name: str
    colour: int
    spans: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Filled rectangles: x from, x to, y from, y to."""

    name: str
    colour: int
    boxes: tuple[tuple[float, float, float, float], ...]
    strength: float = 1.0
    """Opacity."""


@dataclass(frozen=True, slots=True)
class Line:
    """Straight lines from point to point."""

    name: str
    colour: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Words:
    """Texts, centred at points."""

    texts: tuple[tuple[float, float, str], ...]
    name: str = ""
    colour: int = 0


Mark = Dots | Bars | Boxes | Line | Words


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart."""

    name: str
    """Letters, digits and dashes."""
    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    is_wide: bool = False
    height: int = 230
    """Pixels at the natural size."""
    note: str = ""
    """A sentence below it."""


def number(value: float) -> str:
    """Short: 0.15, 3, 1500."""
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"


def linear(label: str, low: float, high: float, n_ticks: int = 5, *, is_tight: bool = False) -> Axis:
    """An axis with round ticks that takes in both ends; with ``is_tight`` it ends at ``high``, between two ticks."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / n_ticks
    magnitude = 10.0 ** floor(log10(rough))
    step = next(factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if factor * magnitude >= rough * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    ticks = tuple((k * step, number(k * step)) for k in range(first, last + 1))
    if is_tight:
        return Axis(label, first * step, high, tuple(tick for tick in ticks if tick[0] <= high))
    return Axis(label, first * step, last * step, ticks)


def times(label: str, values: list[float]) -> Axis:
    """An axis of times in milliseconds, logarithmic where they differ by more than 8 times.

    It begins near the shortest, where differences decide; at 0 only if that is near.
    """
    low, high = min(values), max(values)
    if low <= 0 or high / low < 8:
        begin = low - 0.08 * (high - low)
        return linear(label, begin if begin > 0.25 * high else 0.0, high * 1.02)
    low, high = low / 1.04, high * 1.04
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 200 else (1,)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    return Axis(f"{label}, log scale", low, high, tuple((tick, number(tick)) for tick in ticks if low <= tick <= high), is_log=True)


def categories(label: str, names: list[str]) -> Axis:
    """An axis with a place for each name, at 0, 1, 2, ...; many or long names are thinned out."""
    # Room for about 42 characters below a narrow chart.
    longest = max(map(len, names), default=1)
    every = max(1, ceil(len(names) * (min(longest, 12) + 1) / 44))
    ticks = tuple(
        (float(k), name if len(name) <= 14 else f"{name[:13]}\N{HORIZONTAL ELLIPSIS}") for k, name in enumerate(names) if k % every == 0
    )
    return Axis(label, -0.5, len(names) - 0.5, ticks, has_grid=False)
