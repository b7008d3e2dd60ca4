"""The time of a step before and after its tuning, from the records of its sites. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_tune.cache import CandidateRecord, TuningRecord


def step_times(records: Sequence[TuningRecord]) -> tuple[float | None, float | None]:
    """Milliseconds of the step with the first configs, and with the winners; None where a site was not timed.

    Of several sites the differences that their first configs make are added up.
    """
    known_ms = [ms for each in records if (ms := _step_ms(each.best)) is not None]
    if not records or len(known_ms) < len(records):
        return None, None
    best_ms = max(known_ms)
    losses_ms = [ms for each in records if (ms := _loss_ms(each)) is not None]
    return (None if len(losses_ms) < len(records) else best_ms + sum(losses_ms)), best_ms


def _loss_ms(record: TuningRecord) -> float | None:
    """Milliseconds that the first config would add to the step; None where nothing tells.

    By the steps where both were timed to the end or in the finals. In the race the other sites try their own candidates, and what these
    add to the step is not this site's: there the kernels' times tell, of one launch a step.
    """
    first, best = record.candidates[0], record.best
    if first.index == best.index:
        return 0.0
    first_ms, best_ms = _step_ms(first), _step_ms(best)
    if first_ms is None or best_ms is None:
        return None
    if first.left is None or "finals" in first.left:
        return first_ms - best_ms
    loss_ms = (first.latency_ms or 0.0) - (best.latency_ms or 0.0)
    return loss_ms if loss_ms >= 0 else None  # a slower kernel in a faster step


def _step_ms(each: CandidateRecord) -> float | None:
    return None if each.closure_ms is None or each.latency_ms is None else max(each.closure_ms, each.latency_ms)
