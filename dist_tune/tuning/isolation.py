"""``DIST_TUNE_ISOLATE=1``: each new candidate runs once, untimed and alone, before anything else is done with it. Collective.

A process that ends then leaves no doubt which candidate was the cause, and its journal says so: one death is enough for quarantine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dist_tune.errors import reasons
from dist_tune.replays import ISOLATION
from dist_tune.search import Trial
from dist_tune.tuning.context import Closure, TuningContext


def isolate(context: TuningContext, closure: Closure, candidates: Mapping[str, Collection[int]]) -> None:
    """Run candidates in turn (site -> candidates), each in a replay that ends before the next begins; drop those that fail on any rank.

    The other sites run what ran in the first run, or here.

    Raises:
        NoValidConfigError: on all ranks, if no candidate of a site runs on all of them.
    """
    if not candidates:
        return
    known: dict[str, Trial] = {}
    for label in sorted(candidates):
        for i in candidates[label]:
            trial = Trial(i, is_timed=False)
            context.replays.run_batch(closure, [{**known, label: trial}], ISOLATION)
            known[label] = trial
    context.replays.undo()
    failed = context.vote("isolated", context.sites.take_failures())
    for label, failures in failed.items():
        if label in context.race:
            context.race[label].drop(reasons(failures))
    context.check_alive()
