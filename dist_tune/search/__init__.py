"""The search: the next candidate of each site, and the winner.

Pure: fed with numbers that are equal on all ranks, it answers the same on every rank. Knows neither
Triton nor torch.distributed nor clocks nor disk.
"""

from dist_tune.search.guided import Guide, guide_of
from dist_tune.search.pace import N_PLAIN, ONLINE, Pace
from dist_tune.search.plan import (
    NOT_TRIED,
    Account,
    CandidateResult,
    Objective,
    Plan,
    PriorTimes,
    Replay,
    SearchName,
    Times,
    Trial,
)
from dist_tune.search.race import Race
from dist_tune.search.statistics import median, spread, without_outliers
from dist_tune.search.times import Report, Samples, reduce_reports

__all__ = [
    "NOT_TRIED",
    "N_PLAIN",
    "ONLINE",
    "Account",
    "CandidateResult",
    "Guide",
    "Objective",
    "Pace",
    "Plan",
    "PriorTimes",
    "Race",
    "Replay",
    "Report",
    "Samples",
    "SearchName",
    "Times",
    "Trial",
    "guide_of",
    "median",
    "reduce_reports",
    "spread",
    "without_outliers",
]
