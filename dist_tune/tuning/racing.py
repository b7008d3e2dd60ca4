"""Fourth and fifth phase: the replays that the race asks for, until every site has its winner. Collective."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

from dist_tune.errors import Failures, reasons
from dist_tune.replays import RACE, WARM_UP, Conditions, finals_of
from dist_tune.search import Replay, Report, Trial, reduce_reports
from dist_tune.tuning.compilation import compile_variants, compile_waves, lacking
from dist_tune.tuning.context import Closure, TuningContext
from dist_tune.tuning.discover import discover
from dist_tune.tuning.entering import enter_sites
from dist_tune.tuning.warm_up import warm_up

_NOTE_EVERY_S = 0.1
_MAX_REPEATS = 4
"""Times that the lost replays of a batch are run again; the race asks again for what it still lacks."""


def run_race(context: TuningContext, closure: Closure) -> None:
    """Run batches of replays, and reduce what each rank measured; sites that are met late are entered in between.

    It ends early where launches ask for ever new variants of a kernel (``variants.endless``).
    """
    race, replays = context.race, context.replays
    struck: set[int] = set()
    in_finals = False
    while True:
        try_waves(context, closure)
        batch = race.batch()
        _tell_of_rungs(context)
        if not batch:
            if _is_right_again(context, closure):
                break
            continue
        while race.begun_anew:
            replays.trials.samples.forget(race.begun_anew.pop())
        is_final = race.is_final
        if is_final != in_finals:  # from finals to a race where a site was missed before
            replays.trials.samples.restart()
        in_finals = is_final
        context.story.phase("finals" if is_final else "race", race.bound)
        context.story.terminal.expect(race.n_queued)
        reduced = _run(context, closure, batch, finals_of(context.plan) if is_final else RACE, struck)
        if replays.trials.variants.endless:
            return
        race.tell(len(batch), reduced)
        context.expenses.end_phase("finals" if is_final else "race")
        if reduced.has_new_sites:
            manifest = discover(context, closure, is_watched=True, is_under_way=True)
            assert manifest is not None  # None only where nothing is under way
            replays.undo()
            enter_sites(context, closure, manifest)
        context.check_alive()


def _is_right_again(context: TuningContext, closure: Closure) -> bool:
    """Judge the winner of a checked function once more; false if it is out, because a result of a later run than its first is wrong."""
    race = context.race
    best = {label: best for label in context.entries if (best := race[label].best) is not None}
    checked = {label for label in best if (site := context.sites.met.get(label)) is not None and site.is_whole and site.checker is not None}
    if not checked:
        return True
    schedule = {label: Trial(i, is_timed=False, is_checked=label in checked) for label, i in best.items()}
    context.replays.run_batch(closure, [schedule], WARM_UP)
    context.replays.undo()
    for label, failures in context.vote("winners", context.sites.take_failures()).items():
        race[label].drop(reasons(failures))
    context.check_alive()
    return all(race[label].best == best[label] for label in checked)


def _tell_of_rungs(context: TuningContext) -> None:
    """Tell who has left the race since the last time, and who is ahead."""
    race = context.race
    for label in context.entries:
        if label in race and (best := race[label].best) is not None:
            context.story.rung(
                label, race[label].alive(), (best, times.kernel_ms if (times := race[label].times.get(best)) else inf), race[label].left
            )


def _run(context: TuningContext, closure: Closure, batch: list[Replay], conditions: Conditions, struck: set[int]) -> Report:
    """Run a batch, and those of its replays again in which some rank had to compile a kernel; the report of all of it."""
    budget_s, n_repeats, noted = context.plan.budget_s, 0, [time.monotonic()]
    samples, ranks = context.replays.trials.samples, context.ranks

    def note() -> None:
        # What a process alone measures is agreed at once: a death costs no batch.
        if ranks.is_alone and time.monotonic() - noted[0] >= _NOTE_EVERY_S:
            local = {ranks.rank: samples.report({}, batch, context.race.kernel_times_ms())}
            context.sites.journal.agreed(reduce_reports(local).times)
            noted[0] = time.monotonic()

    todo = batch
    failures: Failures = {}
    has_new_sites = False
    while True:
        first = context.replays.n_replays
        context.replays.run_batch(closure, todo, conditions, note)
        reduced = _report(context, batch, struck)
        has_new_sites |= reduced.has_new_sites
        for label, each in reduced.failures.items():
            failures[label] = each | failures.get(label, {})
        if reduced.has_new_variants:
            compile_variants(context)
            if context.replays.trials.variants.endless:
                return reduced
        todo = [schedule for k, schedule in enumerate(todo) if first + k in reduced.lost]
        is_spent = budget_s is not None and reduced.elapsed_s >= budget_s
        if not todo or n_repeats == _MAX_REPEATS or is_spent:
            return replace(reduced, failures=failures, has_new_sites=has_new_sites)
        n_repeats += 1
        context.replays.n_thrown_away += len(todo)
        why = "a kernel was not compiled for the arguments of a launch on some rank"
        context.story.info(f"closure={context.name} {len(todo)} replays are thrown away and run again: {why}")


def _report(context: TuningContext, batch: list[Replay], struck: set[int]) -> Report:
    """Reduce the times of a batch. ``struck``: replays whose times count on no rank."""
    samples = context.replays.trials.samples
    failures, has_new_variants = context.sites.take_failures(), bool(lacking(context))
    while True:
        local = samples.report(failures, batch, context.race.kernel_times_ms(), bool(context.sites.new))
        reduced = context.reduce_reports("report", replace(local, has_new_variants=has_new_variants))
        if set(reduced.disturbed) <= struck:
            context.sites.journal.agreed(reduced.times)
            return reduced
        # A stand-in on one rank makes its peers wait: the times of that replay count on none.
        samples.strike(reduced.disturbed)
        struck |= set(reduced.disturbed)


def try_waves(context: TuningContext, closure: Closure) -> None:
    """Bring the candidates that guided searches ask for into the race, until there are some to time or all searches have ended.

    The race asks from reduced times alone, so all ranks compile the same candidates.

    Raises:
        NoValidConfigError: on all ranks, if no candidate of a site runs on all of them.
    """
    race, entries = context.race, context.entries
    while waves := race.waves():
        for label, wave in waves.items():
            n_left = len(entries[label].untried)
            context.story.info(f"site={label} tries {len(wave)} more of {len(entries[label].texts)} candidates, {n_left} are untried")
        context.story.phase("compile")
        for label, failures in compile_waves(context, waves).items():
            race[label].drop(reasons(failures))
        context.expenses.end_phase("compile")
        if n_runs := {label: entries[label].n_warm_ups for label in waves if entries[label].n_warm_ups}:
            context.replays.undo()
            warm_up(context, closure, n_runs, waves=waves)
            context.replays.undo()
        race.join(waves)
    context.check_alive()
