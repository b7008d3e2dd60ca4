"""Launches of kernels and functions, made by the tuner with a config of its choice.

The only user of Triton's Autotuner internals. Knows nothing of ranks, times or search.
"""

from dist_tune.runtime import interception
from dist_tune.runtime.buckets import Buckets
from dist_tune.runtime.function_launch import FunctionLaunch, TunableFunction
from dist_tune.runtime.interception import Listener
from dist_tune.runtime.kernel import Argument, Launch, NoFitError, specialisation
from dist_tune.runtime.libraries import own_runs, unheard_tuners
from dist_tune.runtime.recording import (
    LaunchRecorder,
    RecordedLaunch,
    around_launches,
    predict,
    refusing_talk,
)
from dist_tune.runtime.stores import noting_tensors, noting_training
from dist_tune.runtime.tunable import Slot, Timings, Tunable

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
    "refusing_talk",
    "specialisation",
    "unheard_tuners",
]
