"""Launches of kernels and functions in the tuner's hands.

The only user of Triton's Autotuner internals: a miss becomes a launch with a chosen config.
Knows nothing of ranks, times or search.
"""

from dist_tune.runtime.dry_run import Dry, TalkedError, Watch, compile_ahead, dry_run
from dist_tune.runtime.foresight import Forecast, Foreseen, Recorder, forecasts
from dist_tune.runtime.function_launch import FunctionLaunch, TunableFunction
from dist_tune.runtime.intercept import Listener
from dist_tune.runtime.launch import Launch
from dist_tune.runtime.tunable import Slot, Tunable, Undo

__all__ = [
    "Dry", "Forecast", "Foreseen", "FunctionLaunch", "Launch", "Listener", "Recorder", "Slot", "TalkedError", "Tunable",
    "TunableFunction", "Undo", "Watch", "compile_ahead", "dry_run", "forecasts",
]  # fmt: skip
