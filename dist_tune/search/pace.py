"""Seconds of a search: what is spent, how long a replay takes, and how many replays are run before the next meeting. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite

from dist_tune.search.plan import Plan
from dist_tune.search.times import Report

LONG_S = 0.25
"""Replays from this length on are asked for in batches of about ``BATCH_S``."""
BATCH_S = 1.0
BUDGET_BATCH_S = 0.1
"""Length of batches where there is a budget: a candidate may be far slower than those before it, and a meeting takes some ms at most."""
WARM_UP_S = 1.0
"""Untimed replays before a race last about this long at most."""


class Pace:
    """Fed alike on all ranks, it answers alike."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._elapsed_s = self._first_s = self._replays_s = 0.0
        self._latest_s: float | None = None
        self._began_s: float | None = None

    @property
    def is_spent(self) -> bool:
        """True if the search has used up its budget."""
        return self._plan.budget_s is not None and self._elapsed_s >= self._plan.budget_s

    def is_spent_but(self, share: float) -> bool:
        """True if no more than this share is left of what the race had of the budget at its beginning."""
        began_s = self._began_s or 0.0
        return self._plan.budget_s is not None and self._elapsed_s - began_s >= (self._plan.budget_s - began_s) * (1 - share)

    def begin(self) -> None:
        """Note that the race begins, if it has not begun."""
        self._began_s = self._elapsed_s if self._began_s is None else self._began_s

    def expect(self, run_s: float) -> None:
        """Take in the time of a run that may have compiled: replays may be as long, until one has been timed."""
        self._first_s = max(self._first_s, run_s)

    def spend(self, n_replays: int, report: Report) -> None:
        """Take in the seconds of a batch."""
        if n_replays and report.batch_s > 0:
            self._latest_s = report.batch_s / n_replays
        self._elapsed_s = max(self._elapsed_s, report.elapsed_s)

    def n_in(self, spare_s: float, n_replays: int, batch_s: float) -> int:
        """Replays that there are in ``spare_s`` seconds, after ``n_replays`` of which the last batch took ``batch_s``; 0 if not known."""
        self._replays_s += batch_s
        return int(spare_s * n_replays / self._replays_s) if self._replays_s > 0 else 0

    def n_next(self, known_ms: Sequence[Sequence[float | None]]) -> int:
        """Replays of a list to run before the next meeting: all if they are short, so many that a budget is kept otherwise.

        ``known_ms``: of each, milliseconds of a replay with each of its candidates, as far as they are known.
        """
        expected_s = [self._expected_s(each) for each in known_ms]
        budget_s = self._plan.budget_s
        if budget_s is None and sum(expected_s) < LONG_S * len(expected_s):
            return len(expected_s)
        allowed_s = BATCH_S if budget_s is None else min(BUDGET_BATCH_S, budget_s - self._elapsed_s)
        n_next = 0
        while n_next < len(expected_s) and (allowed_s := allowed_s - expected_s[n_next]) >= 0:
            n_next += 1
        return min(max(1, n_next), len(expected_s))

    def n_spare(self, n_untimed: int, known_ms: Iterable[float | None]) -> int:
        """Of so many untimed replays those that are too many because they are long."""
        each_s = self._expected_s(list(known_ms)) if n_untimed else 0.0
        return max(0, n_untimed - int(WARM_UP_S / each_s)) if isfinite(each_s) and each_s > 0 else 0

    def _expected_s(self, known_ms: Sequence[float | None]) -> float:
        """Seconds of a replay by what is known of its candidates, or of the replays before; endless if they may be long."""
        least_s = max((ms for ms in known_ms if ms is not None), default=0.0) / 1e3
        if None not in known_ms:
            return least_s
        may_be_long = self._plan.budget_s is not None or self._first_s >= LONG_S
        return max(least_s, self._latest_s) if self._latest_s is not None else inf if may_be_long else least_s
