"""Fourth and fifth phase: the replays that the race asks for, until every site has its winner.

Collective.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from dist_tune.log import amount, closure_name
from dist_tune.ranks import Reduction
from dist_tune.replays import RACE, WARM_UP, Conditions
from dist_tune.search import Replay, Report, Trial, reduce_reports
from dist_tune.tuning.compiling import compile_variants, lacking
from dist_tune.tuning.context import Closure, TuningContext
from dist_tune.tuning.entering import enter_met, try_waves
from dist_tune.tuning.notices import notice

_NOTE_EVERY_S = 0.1
_MAX_REPEATS = 4
"""Times that the lost replays of a batch are run again; the race asks again for what it still
lacks.
"""


def run_race(context: TuningContext, closure: Closure) -> None:
    """Run batches of replays, and reduce what each rank measured; sites that are met late are
    entered in between.

    It ends early where launches ask for ever new variants of a kernel (``variants.endless``).
    """
    race, trials, conditions = context.race, context.replays.trials, RACE
    plan, wants_graphs = context.options.plan, context.options.plan.objective == "graph"
    finals = Conditions("finals", is_cold=plan.is_cold, times_launches=plan.objective == "kernel")
    repeats = (
        f", and {race.spare_s:g} s of repeats where the clock cannot tell kernels apart"
        if race.spare_s
        else ""
    )
    context.story.debug(f"{context.name} searches in at most {race.n_left} replays{repeats}")
    while True:
        try_waves(context, closure)
        batch = race.batch()
        _tell_of_rungs(context)
        if not batch:
            if _is_right_again(context, closure):
                break
            continue
        while race.begun_anew:
            trials.samples.forget(race.begun_anew.pop())
        before, conditions = conditions, finals if race.is_final else RACE
        if conditions != before:  # also from finals to a race where a site was missed before
            trials.samples.restart()
        context.story.phase("finals" if race.is_final else "race")
        # What a guided search compiles next, and how long that takes, is not known.
        is_guided = not race.is_final and any(entry.untried for entry in context.entries.values())
        context.story.terminal.expect(0 if is_guided else race.n_left, race.spare_s)
        if wants_graphs and race.is_final and (why_not := _capture(context, closure, batch)):
            told = (
                'is compared as it is, without objective="graph", because it cannot be captured:'
                f" {why_not}"
            )
            notice(context, {"no graph": f"{closure_name(context.name)} {told}"})
            wants_graphs = context.replays.in_graphs = False
            trials.samples.restart()
        runs, n_taken = context.replays.paced(race, batch)
        reduced = _run(context, closure, runs, conditions)
        context.replays.graphs.clear()
        if trials.variants.endless:
            return
        race.tell(n_taken, reduced)
        context.expenses.end_phase(conditions.phase)
        if reduced.has_new_sites:
            enter_met(context, closure)
        context.check_alive()


def _capture(context: TuningContext, closure: Closure, batch: list[Replay]) -> str:
    """Capture the schedules of a batch on all ranks, and replay each graph once; or why that cannot
    be done, on the first such rank.
    """
    replays = context.replays
    for step in (
        (replays.capture,) if replays.in_graphs else (replays.look_for_obstacles, replays.capture)
    ):
        if why_not := context.reduce("graph", step(closure, batch), _first_reason):
            replays.graphs.clear()
            return why_not
    replays.in_graphs = True
    untimed: list[Replay] = [
        {label: Trial(i, is_timed=False) for label, i in candidates}
        for candidates in replays.graphs
    ]
    replays.run_batch(closure, untimed, WARM_UP)  # the first replay of a graph uploads it
    return ""


@Reduction
def _first_reason(parts: Mapping[int, str]) -> str:
    return next((f"rank {rank}: {why}" for rank, why in parts.items() if why), "")


def _is_right_again(context: TuningContext, closure: Closure) -> bool:
    """Judge the winner of a checked function in more runs; false if it is out, because a result of
    a later run than its first is wrong.
    """
    race = context.race
    best = {label: best for label in context.entries if (best := race[label].best) is not None}
    batch: list[Replay] = []
    for label, i in best.items():
        if (
            (site := context.sites.met.get(label)) is not None
            and site.is_whole
            and site.checker is not None
        ):
            others = {each: Trial(candidate, is_timed=False) for each, candidate in best.items()}
            judged = race[label].alive() if site.checker.judges_all else [i]
            batch += [
                others | {label: Trial(each, is_timed=False, is_checked=True)}
                for each in judged
                for _ in range(site.checker.n_last)
            ]
    if not batch:
        return True
    context.replays.run_batch(closure, batch, WARM_UP)
    context.replays.undo()
    context.reduce_reports("winners", Report(failures=context.sites.take_failures()))
    context.check_alive()
    return all(race[label].best == i for label, i in best.items())


def _tell_of_rungs(context: TuningContext) -> None:
    """Tell how fast the best candidates are so far."""
    race = context.race
    for label in context.entries:
        if (best := race[label].best) is not None:
            times = race[label].times.get(best)
            context.story.best(label, times.kernel_ms if times is not None else inf)


def _run(
    context: TuningContext, closure: Closure, batch: list[Replay], conditions: Conditions
) -> Report:
    """Run a batch, and those of its replays again in which some rank had to compile a kernel; the
    last report, which is of all of it.
    """
    replays, ranks, samples = context.replays, context.ranks, context.replays.trials.samples
    noted_at, n_left, todo = time.monotonic(), _MAX_REPEATS, batch

    def note() -> None:
        # What a process alone measures is agreed at once: a death costs no batch.
        nonlocal noted_at
        if ranks.is_alone and time.monotonic() - noted_at >= _NOTE_EVERY_S:
            local = {ranks.rank: samples.report({}, batch, context.race.kernel_times_ms())}
            context.sites.journal.agreed(reduce_reports(local).times)
            noted_at = time.monotonic()

    while True:
        first = replays.n_replays
        replays.run_batch(closure, todo, conditions, note)
        reduced = _report(context, batch)
        if reduced.has_new_variants:
            compile_variants(context)
        todo = [schedule for k, schedule in enumerate(todo) if first + k in reduced.lost]
        is_spent = (
            context.options.plan.budget_s is not None
            and reduced.elapsed_s >= context.options.plan.budget_s
        )
        if not todo or n_left == 0 or is_spent or replays.trials.variants.endless:
            return reduced
        n_left -= 1
        replays.n_run_again += len(todo)
        why = "a kernel was not compiled for the arguments of a launch on some rank"
        context.story.debug(f"{amount(len(todo), 'replay')} run again: {why}")


def _report(context: TuningContext, batch: list[Replay]) -> Report:
    """Reduce the times of a batch."""
    samples = context.replays.trials.samples
    failures, has_new_variants = context.sites.take_failures(), bool(lacking(context))
    while True:
        local = samples.report(
            failures, batch, context.race.kernel_times_ms(), bool(context.sites.new)
        )
        reduced = context.reduce_reports(
            "report", replace(local, has_new_variants=has_new_variants)
        )
        # A stand-in on one rank makes its peers wait: the times of that replay count on none.
        if not samples.strike(reduced.disturbed):
            context.sites.journal.agreed(reduced.times)
            return reduced
