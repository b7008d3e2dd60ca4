"""Parameters of configs, and how much of the variance of the times each explains. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import log
from statistics import fmean
from typing import NamedTuple

from dist_tune.cache import CandidateRecord, TuningRecord, differing

MAX_VALUES = 40
"""A parameter with more values has no plot of its own."""


class Parameter(NamedTuple):
    """A field of the configs that differs between candidates."""

    name: str
    values: list[str]
    """In order: numbers by size."""
    explained: float
    """Part of the variance of the log times that it explains alone, from 0 to 1, less what chance would explain."""


def timed(record: TuningRecord) -> list[CandidateRecord]:
    """Candidates with a time, except those that are the same kernel as another."""
    return [each for each in record.candidates if each.latency_ms and each.failure is None and each.equal_to is None]


def value_of(each: CandidateRecord, name: str) -> str:
    """The value of a field as text; "-" where the config has none."""
    return str(each.fields[name]) if name in each.fields else "-"


def parameters(record: TuningRecord) -> list[Parameter]:
    """Fields with at least two values, those first that explain most."""
    candidates = timed(record)
    found = []
    for name in differing(record.candidates):
        values = {value_of(each, name): each.fields.get(name) for each in candidates}
        if 2 <= len(values) <= MAX_VALUES:
            found.append(Parameter(name, _in_order(values), explained(candidates, name)))
    return sorted(found, key=lambda each: -each.explained)


def explained(candidates: Sequence[CandidateRecord], name: str) -> float:
    """Epsilon squared of a one-way analysis of variance of the log times."""
    groups: dict[str, list[float]] = defaultdict(list)
    for each in candidates:
        groups[value_of(each, name)].append(log(each.latency_ms or 1.0))
    n_all, n_groups = len(candidates), len(groups)
    if n_all <= n_groups:
        return 0.0
    everything = [value for group in groups.values() for value in group]
    total = _squares(everything)
    within = sum(map(_squares, groups.values()))
    return max(0.0, 1.0 - (within / (n_all - n_groups)) / (total / (n_all - 1))) if total > 0 else 0.0


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _in_order(values: Mapping[str, object]) -> list[str]:
    if all(isinstance(value, int | float) for value in values.values()):
        return sorted(values, key=lambda text: float(values[text]))  # type: ignore[arg-type]  # numbers, as checked
    return sorted(values)
