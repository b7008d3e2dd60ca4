"""Fourth and fifth phase: the replays that the race asks for, until every site has its winner. Collective."""

from __future__ import annotations

from dist_tune.search import Replay
from dist_tune.tuning.context import Closure, TuningContext
from dist_tune.tuning.discover import discover
from dist_tune.tuning.entering import enter_sites
from dist_tune.tuning.replays import RACE, finals_of


def run_race(context: TuningContext, closure: Closure) -> None:
    """Run batches of replays, and reduce what each rank measured; sites that are met late are entered in between."""
    race, samples = context.race, context.replays.trials.samples
    struck: set[int] = set()
    in_finals = False
    while batch := race.batch():
        is_final = race.is_final
        if is_final and not in_finals:
            samples.restart()
        in_finals = is_final
        context.replays.run_batch(closure, batch, finals_of(context.plan) if is_final else RACE)
        has_new_sites = _report(context, batch, struck)
        context.expenses.end_phase("finals" if is_final else "race")
        if has_new_sites:
            manifest = discover(context, closure, is_watched=True, is_under_way=True)
            assert manifest is not None  # None only where nothing is under way
            context.replays.undo()
            enter_sites(context, closure, manifest)
        context.check_alive()


def _report(context: TuningContext, batch: list[Replay], struck: set[int]) -> bool:
    """Reduce the times of a batch; True if a rank has met new sites. ``struck``: replays whose times count on no rank."""
    samples = context.replays.trials.samples
    failures = context.sites.take_failures()
    while True:
        local = samples.report(failures, batch, context.race.kernel_times_ms(), bool(context.sites.new))
        reduced = context.reduce_reports("report", local)
        if set(reduced.disturbed) <= struck:
            break
        # A stand-in on one rank makes its peers wait: the times of that replay count on none.
        samples.strike(reduced.disturbed)
        struck |= set(reduced.disturbed)
    context.race.tell(len(batch), reduced)
    return reduced.has_new_sites
