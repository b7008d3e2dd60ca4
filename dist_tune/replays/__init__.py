"""Runs of the step: the first one, and replays in which each site launches the candidate whose turn
it is.

Knows clocks, launches and sites; nothing of who wins.
"""

from dist_tune.replays.first_run import FirstRun
from dist_tune.replays.online import OnlineRuns
from dist_tune.replays.replayer import RACE, WARM_UP, Conditions, Replayer, StepTimes
from dist_tune.replays.trials import Trials
from dist_tune.replays.variants import MAX_VARIANTS, Variants

__all__ = [
    "MAX_VARIANTS",
    "RACE",
    "WARM_UP",
    "Conditions",
    "FirstRun",
    "OnlineRuns",
    "Replayer",
    "StepTimes",
    "Trials",
    "Variants",
]
