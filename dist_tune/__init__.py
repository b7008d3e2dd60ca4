"""Tune Triton kernels inside the distributed step they belong to, on all ranks at once."""

from dist_tune.cache import CandidateRecord, Environment, TuningRecord
from dist_tune.contextual import TunedClosure, contextual_autotune
from dist_tune.errors import (
    AbsentRanksError,
    CacheMissError,
    CaptureError,
    DistTuneError,
    NestedTuningError,
    NoValidConfigError,
    PeerFailedError,
    RankMismatchError,
    StoreGoneError,
    StuckDeviceError,
)
from dist_tune.function import TunedFunction, autotune
from dist_tune.keys import power_of_two, size_classes, to_hashable
from dist_tune.measure import matches
from dist_tune.pruning import prune_by_group_size_m, prune_by_shared_memory

__all__ = [
    "AbsentRanksError",
    "CacheMissError",
    "CandidateRecord",
    "CaptureError",
    "DistTuneError",
    "Environment",
    "NestedTuningError",
    "NoValidConfigError",
    "PeerFailedError",
    "RankMismatchError",
    "StoreGoneError",
    "StuckDeviceError",
    "TunedClosure",
    "TunedFunction",
    "TuningRecord",
    "autotune",
    "contextual_autotune",
    "matches",
    "power_of_two",
    "prune_by_group_size_m",
    "prune_by_shared_memory",
    "size_classes",
    "to_hashable",
]
