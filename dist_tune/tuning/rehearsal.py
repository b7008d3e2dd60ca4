"""Functions run with each of their configs before anything is timed: what cannot be compiled ahead compiles here.

Knows the order of things; what a config launches and whether it answers rightly is known to others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dist_tune.runtime import Listener, Recorder
from dist_tune.search import Search
from dist_tune.tuning.loading import Loader
from dist_tune.tuning.replayer import REHEARSAL, Replayer
from dist_tune.tuning.sites import Sites


def rehearse(
    closure: Callable[[], Any],
    listener: Listener,
    n_runs: Mapping[str, int],
    *,
    search: Search,
    sites: Sites,
    loader: Loader,
    replayer: Replayer,
) -> None:
    """Run each candidate of some sites untimed, as often as is said; failures are ``sites.take_failures()`` then. Collective.

    The first run is recorded, and what it says of the others is compiled ahead on all ranks; unless the caller has compiled all.
    """
    if all(sites.met[label].is_foreseen for label in n_runs if label in sites.met):
        replayer.run_batch(closure, listener, search.rehearsal(n_runs), REHEARSAL)
        return
    recorder = sites.recorder = Recorder()
    with recorder.recording():
        replayer.run_batch(closure, listener, search.rehearsal(n_runs)[:1], REHEARSAL)
        loader.foresee(recorder)
        replayer.run_batch(closure, listener, search.rehearsal(n_runs), REHEARSAL)
    sites.recorder = None
