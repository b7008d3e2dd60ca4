"""The search: the next candidate of each site, and the winner.

Pure: fed with numbers that are equal on all ranks, it answers the same on every rank. Knows neither Triton nor torch.distributed nor
clocks nor disk.
"""

from dist_tune.search.guide import NOT_TRIED, Guide, LateGuide, guide_of
from dist_tune.search.plan import CandidateResult, Plan, PriorTimes, Replay, SearchName, Trial
from dist_tune.search.race import Race
from dist_tune.search.reports import BatchReport, ReducedReport, reduce_reports
from dist_tune.search.samples import Samples
from dist_tune.search.selection import Objective, RacingOptions, ReducedTimes, Selection
from dist_tune.search.strategies import STRATEGIES, SearchStrategy, Strategy, make_strategy

__all__ = [
    "NOT_TRIED", "STRATEGIES", "BatchReport", "CandidateResult", "Guide", "LateGuide", "Objective", "Plan", "PriorTimes", "Race",
    "RacingOptions", "ReducedReport", "ReducedTimes", "Replay", "Samples", "SearchName", "SearchStrategy", "Selection", "Strategy", "Trial",
    "guide_of", "make_strategy", "reduce_reports",
]  # fmt: skip
