"""Tune Triton kernels inside the distributed step they belong to, on all ranks at once.

Here are the two decorators and what their users need. Beside them:

    dist_tune.offline      tuning scripts: the best config at given sizes, shipped as JSON
    dist_tune.testing      a fake H200 and ranks on one machine, for tests of your own steps
    dist_tune.cli          the command dist-tune

The rest is internal, from the leaves up: distributed, measure, search, compiler, cache, runtime, tuning.
"""

from dist_tune.cache import CandidateRecord, Environment, TuningRecord
from dist_tune.contextual import contextual_autotune
from dist_tune.errors import (
    AbsentRanksError,
    CacheMissError,
    CaptureError,
    DistTuneError,
    EndlessVariantsError,
    NestedTuningError,
    NoValidConfigError,
    PeerFailedError,
    RankMismatchError,
    StoreGoneError,
    StuckConfigError,
    StuckDeviceError,
)
from dist_tune.function import autotune
from dist_tune.keys import power_of_two, size_classes, to_hashable
from dist_tune.measure import matches
from dist_tune.pruning import prune_by_group_size_m, prune_by_shared_memory
from dist_tune.tuned import TunedClosure, TunedFunction

__all__ = [  # noqa: RUF022  # by what it is for
    "contextual_autotune", "autotune", "TunedClosure", "TunedFunction",
    "to_hashable", "power_of_two", "size_classes", "prune_by_shared_memory", "prune_by_group_size_m", "matches",
    "TuningRecord", "CandidateRecord", "Environment",
    "DistTuneError", "AbsentRanksError", "CacheMissError", "CaptureError", "EndlessVariantsError", "NestedTuningError",
    "NoValidConfigError", "PeerFailedError", "RankMismatchError", "StoreGoneError", "StuckConfigError", "StuckDeviceError",
]  # fmt: skip
