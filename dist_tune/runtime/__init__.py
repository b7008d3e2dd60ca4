"""Launches of kernels and functions in the tuner's hands.

The only user of Triton's Autotuner internals: a miss becomes a launch with a chosen config.
Knows nothing of ranks, times or search.
"""

from dist_tune.runtime.dry_runs import DryRun, TalkedError, Watch, compile_ahead, dry_run
from dist_tune.runtime.function_launch import FunctionLaunch, TunableFunction
from dist_tune.runtime.interception import Listener
from dist_tune.runtime.kernel_launch import Launch
from dist_tune.runtime.precompile import ForeseenFailure, LaunchRecorder, Precompile, precompiles
from dist_tune.runtime.tunable import Slot, Tunable, Undo

__all__ = [
    "DryRun",
    "ForeseenFailure",
    "FunctionLaunch",
    "Launch",
    "LaunchRecorder",
    "Listener",
    "Precompile",
    "Slot",
    "TalkedError",
    "Tunable",
    "TunableFunction",
    "Undo",
    "Watch",
    "compile_ahead",
    "dry_run",
    "precompiles",
]  # fmt: skip
