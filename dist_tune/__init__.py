"""Tune Triton kernels inside the distributed step they belong to, on all ranks at once."""

from dist_tune.contextual import TunedClosure, contextual_autotune
from dist_tune.errors import (
    AbsentRanksError,
    CaptureError,
    DistTuneError,
    NestedTuningError,
    NoValidConfigError,
    PeerFailedError,
    RankMismatchError,
    StoreGoneError,
    StuckDeviceError,
)
from dist_tune.records import CandidateRecord, Environment, TuningRecord

__all__ = [
    "AbsentRanksError",
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
    "TuningRecord",
    "contextual_autotune",
]
