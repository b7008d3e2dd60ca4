"""Third phase: untimed runs of each config of a function, because its kernels cannot be compiled ahead of the first run.

Results are checked here, and candidates that fail or answer wrongly on any rank are dropped. Collective.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.replays import WARM_UP
from dist_tune.runtime import LaunchRecorder
from dist_tune.search import Replay
from dist_tune.sites import Site
from dist_tune.tuning.compilation import Waves, precompile
from dist_tune.tuning.context import Closure, TuningContext


def warm_up(context: TuningContext, closure: Closure, n_runs: Mapping[str, int], waves: Waves | None = None) -> None:
    """Run each candidate of some sites (site -> runs of each) untimed, and drop those that fail on any rank.

    Launches inside, which the first run shows, are compiled ahead with the other candidates. ``waves``: only these candidates.
    """
    met, race = context.sites.met, context.race
    replays = race.warm_up(n_runs, waves)
    recorder = LaunchRecorder(context.replays.trials.functions)
    with recorder.recording():
        context.replays.run_batch(closure, replays[:1], WARM_UP)
        if context.plan.budget_s is not None:  # nothing is compiled ahead if that run has spent it
            _tell(context, 1)
        if not race.is_enough(n_runs):
            precompile(context, recorder, waves)
            _run(context, closure, replays[1:], n_runs)
    race.end_warm_up(n_runs)
    for label in n_runs:
        if label in met:  # the last one to run may be the slowest
            met[label].stand_in = race[label].best
    context.check_alive()


def _run(context: TuningContext, closure: Closure, replays: Sequence[Replay], sites: Collection[str]) -> None:
    """Run untimed replays, in batches that a budget allows, and stop where it is spent."""
    is_told = False
    while not is_told or (replays and not context.race.is_enough(sites)):
        n_next = context.race.n_next(replays)
        context.replays.run_batch(closure, list(replays[:n_next]), WARM_UP)
        _tell(context, n_next)
        replays, is_told = replays[n_next:], True


def _tell(context: TuningContext, n_replays: int) -> None:
    """Reduce what these replays took, and drop candidates that failed in them on some rank."""
    for site in context.sites.met.values():
        _drop_harmful(context, site)
    reduced = context.reduce_reports("warmed up", context.replays.trials.samples.report_warm_ups(context.sites.take_failures()))
    context.race.tell_warm_up(n_replays, reduced)
    for label, failures in reduced.failures.items():
        for i, (kind, reason) in failures.items():  # a config that computes something else is worth a look
            told = f'site={label} candidate={i} {reason} config="{context.entries[label].texts[i]}"'
            context.story.warning(told, shown=kind is FailureKind.WRONG_RESULT)


def _drop_harmful(context: TuningContext, site: Site) -> None:
    """Drop candidates that change an argument which others, as right as they, leave as it was."""
    right = {i: names for i, names in site.changes.items() if i not in site.failures}
    for i, names in right.items():
        if harmed := sorted(name for name in names if any(name not in others for others in right.values())):
            reason = (
                f"it changes its argument {' and '.join(harmed)}, which other configs leave as it is; memory that only some configs "
                f"write to belongs into an object, not among the arguments"
            )
            context.sites.fail(site, i, CandidateFailure(FailureKind.WRONG_RESULT, reason))
