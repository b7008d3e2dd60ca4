"""Functions run with each of their configs before anything is timed: what cannot be compiled ahead compiles here.

Knows the order of things; what a config launches and whether it answers rightly is known to others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dist_tune.runtime import LaunchRecorder, Listener
from dist_tune.search import Race
from dist_tune.tuning.loading import Loader
from dist_tune.tuning.replays import WARM_UP, Replayer
from dist_tune.tuning.sites import Sites


def warm_up(
    closure: Callable[[], Any],
    listener: Listener,
    n_runs: Mapping[str, int],
    *,
    search: Race,
    sites: Sites,
    loader: Loader,
    replayer: Replayer,
) -> None:
    """Run each candidate of some sites untimed, as often as is said; failures are ``sites.take_failures()`` then. Collective.

    The first run is recorded, and what it says of the others is compiled ahead on all ranks; unless the caller has compiled all.
    """
    if all(sites.met[label].is_foreseen for label in n_runs if label in sites.met):
        replayer.run_batch(closure, listener, search.warm_up(n_runs), WARM_UP)
        return
    recorder = sites.recorder = LaunchRecorder()
    with recorder.recording():
        replayer.run_batch(closure, listener, search.warm_up(n_runs)[:1], WARM_UP)
        loader.foresee(recorder)
        replayer.run_batch(closure, listener, search.warm_up(n_runs), WARM_UP)
    sites.recorder = None
