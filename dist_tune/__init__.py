"""Tune Triton kernels inside the distributed step they belong to, on all ranks at once.

Here are the two decorators and what their users need. Beside them:

    dist_tune.offline      tuning scripts: the best config at given sizes, shipped as JSON
    dist_tune.testing      a fake H200 and ranks on one machine, for tests of your own steps
    dist_tune.cli          the command dist-tune

The rest is internal; CONTRIBUTING.md has its layout.

A name is imported when it is first used, because torch and Triton take seconds: ``import
dist_tune`` takes milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_tune.ahead import tune_all
    from dist_tune.contextual import contextual_autotune
    from dist_tune.errors import (
        AbsentRanksError,
        CacheMissError,
        CaptureError,
        CommunicatesError,
        DistTuneError,
        MachineError,
        NestedTuningError,
        NoValidConfigError,
        PeerFailedError,
        RankMismatchError,
        StoreGoneError,
        StuckConfigError,
        StuckDeviceError,
        WrongResultError,
    )
    from dist_tune.function import autotune
    from dist_tune.install import install
    from dist_tune.keys import power_of_two, size_classes, to_hashable
    from dist_tune.measure import matches
    from dist_tune.operators import as_operator
    from dist_tune.pruning import prune_by_group_size_m, prune_by_shared_memory
    from dist_tune.records import CandidateRecord, Environment, TuningRecord
    from dist_tune.tuning import TunedClosure, TunedFunction

__version__ = "0.2.0"

__all__ = [  # noqa: RUF022  # by what it is for
    "contextual_autotune",
    "autotune",
    "install",
    "TunedClosure",
    "TunedFunction",
    "tune_all",
    "as_operator",
    "to_hashable",
    "power_of_two",
    "size_classes",
    "prune_by_shared_memory",
    "prune_by_group_size_m",
    "matches",
    "TuningRecord",
    "CandidateRecord",
    "Environment",
    "DistTuneError",
    "AbsentRanksError",
    "CacheMissError",
    "CaptureError",
    "CommunicatesError",
    "MachineError",
    "NestedTuningError",
    "NoValidConfigError",
    "PeerFailedError",
    "RankMismatchError",
    "StoreGoneError",
    "StuckConfigError",
    "StuckDeviceError",
    "WrongResultError",
]

_HOMES = {
    "contextual": ("contextual_autotune",),
    "function": ("autotune",),
    "install": ("install",),
    "tuning": ("TunedClosure", "TunedFunction"),
    "ahead": ("tune_all",),
    "operators": ("as_operator",),
    "keys": ("to_hashable", "power_of_two", "size_classes"),
    "pruning": ("prune_by_shared_memory", "prune_by_group_size_m"),
    "measure": ("matches",),
    "records": ("TuningRecord", "CandidateRecord", "Environment"),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
}
"""Module -> the names that come from it; the imports above say the same to a type checker."""


# With a __getattr__ to look at, a type checker takes every misspelled name for an existing one.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A public name, or a module, from its first use on.

        Modules that import torch, Triton or numpy take 2 s; commands that read records take 0.3 s
        without these three.
        """
        for home, names in _HOMES.items():
            if name in names:
                found: object = getattr(import_module(f"dist_tune.{home}"), name)
                globals()[name] = found
                return found
        if not name.startswith("_"):
            from importlib.util import find_spec  # here, as all that is not always needed

            if find_spec(f"dist_tune.{name}"):
                return import_module(f"dist_tune.{name}")
        raise AttributeError(f"module 'dist_tune' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
