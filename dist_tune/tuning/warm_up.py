"""Third phase: each config of a function once untimed, because its kernels cannot be compiled ahead of the first run.

Results are checked here, and candidates that fail or answer wrongly on any rank are dropped. Collective.
"""

from __future__ import annotations

from collections.abc import Mapping

from dist_tune.errors import FailureKind, reasons
from dist_tune.runtime import LaunchRecorder
from dist_tune.tuning.compilation import precompile
from dist_tune.tuning.context import Closure, TuningContext
from dist_tune.tuning.replays import WARM_UP


def warm_up(context: TuningContext, closure: Closure, n_runs: Mapping[str, int], *, is_recorded: bool) -> None:
    """Run each candidate of some sites (site -> runs of each) untimed, and drop those that fail on any rank.

    ``is_recorded``: the first run is recorded, and the launches of the other candidates, derived from it, are compiled ahead on all
    ranks. The same on all of them.
    """
    replays, trials = context.replays, context.replays.trials
    if is_recorded:
        recorder = trials.recorder = LaunchRecorder()
        with recorder.recording():
            replays.run_batch(closure, context.race.warm_up(n_runs)[:1], WARM_UP)
            precompile(context, recorder)
            replays.run_batch(closure, context.race.warm_up(n_runs), WARM_UP)
        trials.recorder = None
    else:
        replays.run_batch(closure, context.race.warm_up(n_runs), WARM_UP)
    for label, failures in context.vote("warmed up", context.sites.take_failures()).items():
        context.race.drop(label, reasons(failures))
        for i, (kind, reason) in failures.items():  # a config that computes something else is worth a look
            log = context.log.bind(progress=kind is FailureKind.WRONG_RESULT)
            log.warning(f'site={label} candidate={i} {reason} config="{context.entries[label].texts[i]}"')
    context.check_alive()
