"""Launches of kernels and functions, made by the tuner with a config of its choice.

The only user of Triton's Autotuner internals. Knows nothing of ranks, times or search.
"""

from dist_tune.launches import interception
from dist_tune.launches.buckets import Buckets
from dist_tune.launches.fingerprints import read_code
from dist_tune.launches.function_launch import FunctionLaunch, TunableFunction
from dist_tune.launches.interception import Listener
from dist_tune.launches.kernel import Argument, Launch, NoFitError, specialisation
from dist_tune.launches.libraries import own_runs, unheard_tuners
from dist_tune.launches.recording import (
    LaunchRecorder,
    RecordedLaunch,
    around_launches,
    predict,
    refusing_talk,
)
from dist_tune.launches.stores import noting_tensors, noting_training
from dist_tune.launches.tunable import Slot, Timings, Tunable

__all__ = [
    "Argument",
    "Buckets",
    "FunctionLaunch",
    "Launch",
    "LaunchRecorder",
    "Listener",
    "NoFitError",
    "RecordedLaunch",
    "Slot",
    "Timings",
    "Tunable",
    "TunableFunction",
    "around_launches",
    "interception",
    "noting_tensors",
    "noting_training",
    "own_runs",
    "predict",
    "read_code",
    "refusing_talk",
    "specialisation",
    "unheard_tuners",
]
