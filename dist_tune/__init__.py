"""Tune Triton kernels inside the distributed step they belong to, on all ranks at once.

Here are the two decorators and what their users need. Beside them:

    dist_tune.offline      tuning scripts: the best config at given sizes, shipped as JSON
    dist_tune.testing      a fake H200 and ranks on one machine, for tests of your own steps
    dist_tune.cli          the command dist-tune
    dist_tune.launch       torchrun with defaults for this machine

The rest is internal, from the leaves up: output, distributed, measure, search, compiler, cache, runtime, sites, watch, replays, tuning,
report.

A name is imported when it is first used, because torch and Triton take seconds: ``import dist_tune`` takes milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_tune.cache import CandidateRecord, Environment, TuningRecord
    from dist_tune.contextual import contextual_autotune
    from dist_tune.errors import (
        AbsentRanksError,
        CacheMissError,
        CaptureError,
        CommunicatesError,
        DistTuneError,
        EndlessVariantsError,
        InPlaceError,
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
    from dist_tune.keys import power_of_two, size_classes, to_hashable
    from dist_tune.measure import matches
    from dist_tune.pruning import prune_by_group_size_m, prune_by_shared_memory
    from dist_tune.tuned import TunedClosure, TunedFunction

__version__ = "0.2.0"

__all__ = [  # noqa: RUF022  # by what it is for
    "contextual_autotune", "autotune", "TunedClosure", "TunedFunction",
    "to_hashable", "power_of_two", "size_classes", "prune_by_shared_memory", "prune_by_group_size_m", "matches",
    "TuningRecord", "CandidateRecord", "Environment",
    "DistTuneError", "AbsentRanksError", "CacheMissError", "CaptureError", "CommunicatesError", "EndlessVariantsError", "InPlaceError",
    "MachineError", "NestedTuningError", "NoValidConfigError", "PeerFailedError", "RankMismatchError", "StoreGoneError",
    "StuckConfigError", "StuckDeviceError", "WrongResultError",
]  # fmt: skip

_HOMES = {
    "contextual": ("contextual_autotune",),
    "function": ("autotune",),
    "tuned": ("TunedClosure", "TunedFunction"),
    "keys": ("to_hashable", "power_of_two", "size_classes"),
    "pruning": ("prune_by_shared_memory", "prune_by_group_size_m"),
    "measure": ("matches",),
    "cache": ("TuningRecord", "CandidateRecord", "Environment"),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
}
"""Module -> the names that come from it; the imports above say the same to a type checker."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # with a __getattr__ to look at, a type checker takes every misspelled name for an existing one

    def __getattr__(name: str) -> object:
        """A public name from its module, or a module of the package; found once, and an ordinary attribute from then on."""
        if home := _HOME_OF.get(name):
            found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return found
        if not name.startswith("_"):
            from importlib.util import find_spec  # here, as all that is not always needed

            if find_spec(f"{__name__}.{name}"):
                return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
