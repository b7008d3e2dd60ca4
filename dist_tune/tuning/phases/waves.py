"""The waves of guided searches: candidates of large sites that are compiled and warmed up while the race goes on. Collective."""

from __future__ import annotations

from dist_tune.errors import reasons
from dist_tune.tuning.context import Closure, TuningContext
from dist_tune.tuning.phases.compilation import compile_waves
from dist_tune.tuning.phases.isolation import isolate
from dist_tune.tuning.phases.settling import compile_variants
from dist_tune.tuning.phases.warm_up import warm_up


def try_waves(context: TuningContext, closure: Closure) -> None:
    """Bring the candidates that guided searches ask for into the race, until there are some to time or all searches have ended.

    The race asks from reduced times alone, so all ranks compile the same candidates.

    Raises:
        NoValidConfigError: on all ranks, if no candidate of a site runs on all of them.
    """
    race, entries = context.race, context.entries
    while waves := race.waves():
        for label, wave in waves.items():
            entries[label].untried.difference_update(wave)
            n_left = len(entries[label].untried)
            context.log.info(f"site={label} tries {len(wave)} more of {len(entries[label].texts)} candidates, {n_left} are untried")
        context.story.phase("compile")
        for label, failures in compile_waves(context, waves).items():
            race.drop(label, reasons(failures))
        if context.replays.trials.variants.counts:  # a wave is compiled for the first variants only
            compile_variants(context)
        context.expenses.end_phase("compile")
        isolate(
            context,
            closure,
            {label: [i for i in race.alive(label) if i in wave] for label, wave in waves.items() if entries[label].is_isolated},
        )
        if n_runs := {label: entries[label].n_warm_ups for label in waves if entries[label].n_warm_ups}:
            context.replays.undo()
            warm_up(context, closure, n_runs, is_recorded=any(entries[label].is_recorded for label in n_runs), waves=waves)
            context.replays.undo()
        race.join(waves)
    context.check_alive()
