"""The search: the next candidate of each site, and the winner.

Pure: fed with numbers that are equal on all ranks, it answers the same on every rank. Knows neither
Triton nor torch.distributed nor clocks nor disk.
"""

from typing import TYPE_CHECKING

from dist_tune import found_on_use
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

if TYPE_CHECKING:
    from dist_tune.search.guided import Guide, guide_of
    from dist_tune.search.pace import N_PLAIN, ONLINE, Pace
    from dist_tune.search.race import Race
    from dist_tune.search.times import Report, Samples, reduce_reports
# These import numpy or torch, and the words for a record's choice need the values above alone
else:
    __getattr__, __dir__ = found_on_use(
        __name__,
        {
            "guided": ("Guide", "guide_of"),
            "pace": ("N_PLAIN", "ONLINE", "Pace"),
            "race": ("Race",),
            "times": ("Report", "Samples", "reduce_reports"),
        },
    )

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
    "reduce_reports",
]
