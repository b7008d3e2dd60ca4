"""One tuning from top to bottom: discover, compile, warm up, race, finals, apply.

Ranks talk only between replays; each decision follows from what all of them agreed on.
Used by the two decorators and by tuning scripts.
"""

from dist_tune.tuning.background import Online
from dist_tune.tuning.context import TuningOptions
from dist_tune.tuning.notices import count_use, newer_than_tested, notice_of_tracing
from dist_tune.tuning.tuned import TunedClosure, TunedFunction, shown_signature
from dist_tune.tuning.tuning import Tuning

__all__ = [
    "Online",
    "TunedClosure",
    "TunedFunction",
    "Tuning",
    "TuningOptions",
    "count_use",
    "newer_than_tested",
    "notice_of_tracing",
    "shown_signature",
]
