"""One tuning from top to bottom: discover, compile, warm up, race, finals, apply.

Ranks talk only between replays; each decision follows from what all of them agreed on.
Used by the two decorators and by tuning scripts.
"""

from dist_tune.tuning.alone import Untuned
from dist_tune.tuning.anew import Anew
from dist_tune.tuning.context import TuningOptions
from dist_tune.tuning.exclusive import Turn
from dist_tune.tuning.key_history import KeyHistory
from dist_tune.tuning.last_words import limited
from dist_tune.tuning.nearest import NearestConfigs
from dist_tune.tuning.notices import note_of_tracing, tell_of_endless_keys
from dist_tune.tuning.rescue import Make
from dist_tune.tuning.site import check_not_capturing, is_fatal, no_valid_config
from dist_tune.tuning.tuning import Tuning

__all__ = [
    "Anew", "KeyHistory", "Make", "NearestConfigs", "Tuning", "TuningOptions", "Turn", "Untuned", "check_not_capturing", "is_fatal",
    "limited", "no_valid_config", "note_of_tracing", "tell_of_endless_keys",
]  # fmt: skip
