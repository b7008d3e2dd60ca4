"""Last phase: winners are put to use, records are kept, the closure runs once more as its caller
would. Collective.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dist_tune.configs import config_fields
from dist_tune.errors import StoreGoneError, is_machine_failure
from dist_tune.log import kernel_and_key
from dist_tune.measure import peak_bytes
from dist_tune.ranks import all_came
from dist_tune.records import CandidateRecord, Environment, TuningRecord, environment, words
from dist_tune.search import CandidateResult
from dist_tune.sites import Site
from dist_tune.tuning.context import Closure, TuningContext
from dist_tune.tuning.discover import write_record
from dist_tune.tuning.notices import tell_of_unmet, tell_of_untuned

_LAST_RUN = (
    "rank {rank}: {name} is tuned, and this was its last run, which is the call's own and is not"
    " made twice. All kernels have their configs: give the machine what it lacks and call again;"
    " the call runs with these, and a new process finds them in the cache"
)


def apply_winners(
    context: TuningContext, closure: Closure, untuned_bytes: int, why_not: str = ""
) -> Any:
    """Give every site its winner on this rank, and return the value of the last run, which is the
    call's.

    ``untuned_bytes``: the device's peak memory before the race; 0 without a device. ``why_not``:
    the race has no end, so that each site gets its best config so far, and nothing is kept.
    """
    winners = [label for label in context.entries if context.race[label].best is not None]
    context.expenses.total()
    where = environment(len(context.ranks.members), context.compiler.n_ranks)
    records = {label: _record(context, label, where) for label in winners}
    for label, record in records.items():
        context.sites.apply(label, record.best.config, record)
    sites = []
    if why_not:
        tell_of_untuned(context, why_not)
    else:
        sites = _keep(context, records)  # an error in the last run shall not cost them
    context.sites.journal.close(delete=True)
    context.sites.leave_given_up()
    context.sites.reset_once(set(winners))
    context.story.phase("apply")
    try:
        value = context.replays.last_run(closure)
    except Exception as error:
        if is_machine_failure(error):
            error.add_note(_LAST_RUN.format(rank=context.ranks.rank, name=context.name))
        raise
    # All ranks have made their last run: one whose listener raises leaves none of them in a
    # collective.
    context.sites.tell(winners)
    # Its host has come here before us, and its program is at its end.
    with suppress(StoreGoneError):
        context.reduce("done", None, all_came)
    context.expenses.end_phase("apply")
    if not why_not:
        _tell(context, records, sites)
    if untuned_bytes:
        peaks = f"first_run={untuned_bytes} tuning={peak_bytes()}"
        context.story.info(f"peak_memory_bytes {peaks} (of the process so far)")
    return value


def _record(context: TuningContext, label: str, where: Environment) -> TuningRecord:
    """The record of one site; a rank that never met the site knows only what the others
    reported.
    """
    site, race = context.sites.met.get(label), context.race
    texts, results = context.entries[label].texts, race[label].results()
    winner, selection = race[label].best, race[label].selection
    assert winner is not None
    kernel, key = kernel_and_key(label) if site is None else (site.kernel, site.key)
    is_by_graphs = context.replays.in_graphs and race[label].reason == "fastest step"
    return TuningRecord(
        closure=context.name,
        kernel=kernel,
        key=key,
        source=site.source if site is not None else "",
        winner=winner,
        reason=f"{race[label].reason} as a CUDA graph" if is_by_graphs else race[label].reason,
        candidates=[
            _candidate(i, text, each, site)
            for i, (text, each) in enumerate(zip(texts, results, strict=True))
        ],
        n_replays=context.replays.n_replays + 1,  # with the last run, which comes after the record
        n_variants=context.replays.trials.variants.counts.get(label, 1),
        closure_weight=selection.closure_weight if selection else 0.0,
        seconds=context.expenses.seconds.total,
        spent=context.expenses.seconds.model_copy(),  # which go on through the last run
        meeting_seconds=context.expenses.meetings,
        environment=where,
    )


def _candidate(
    index: int, text: str, result: CandidateResult, site: Site | None
) -> CandidateRecord:
    resources = site.resources.get(index) if site is not None else None
    times = result.times
    return CandidateRecord(
        index=index,
        config=text,
        fields=config_fields(site.configs[index]) if site is not None else {},
        latency_ms=times.kernel_ms if times else None,
        spread_ms=times.spread_ms if times else None,
        # The step less what other sites' candidates have added to it, and these are estimates: no
        # step is shorter than its launches.
        closure_ms=max(times.closure_ms, times.launches_ms) if times else None,
        n_replays=times.n_replays if times else 0,
        rank_latencies_ms=times.rank_latencies_ms if times else {},
        failure=result.failure,
        left=result.left,
        equal_to=result.equal_to,
        shared_bytes=resources.shared_bytes if resources else None,
        n_regs=resources.n_regs if resources else None,
        n_spills=resources.n_spills if resources else None,
    )


def _keep(context: TuningContext, records: Mapping[str, TuningRecord]) -> list[words.TunedSite]:
    """Write the records, and what each site's choice rests on."""
    context.records.extend(records.values())
    sites = _written(context, records)
    for label, failures in context.machine.items():
        if label in records:
            told = "; ".join(
                f"candidate {i}: {each.reason}" for i, each in sorted(failures.items())
            )
            context.story.warning(
                f"site={label} is not kept: candidates were dropped for what was no doing of"
                f" theirs: {told}",
                shown=True,
            )
    tell_of_unmet(context, records)
    return sites


def _written(context: TuningContext, records: Mapping[str, TuningRecord]) -> list[words.TunedSite]:
    """Write the records, those of one tuning in the order in which the log has named its sites."""
    sites, numbers = [], context.story.numbers
    for label, record in sorted(records.items(), key=lambda each: numbers.get(each[0], 0)):
        is_kept = label not in context.machine and write_record(
            context, record, context.entries[label].writers
        )
        record_id = context.lookup.record_id(record) if is_kept else ""
        sites.append(words.TunedSite(numbers.get(label, 0), record, record_id))
    return sites


def _tell(
    context: TuningContext, records: Mapping[str, TuningRecord], sites: Sequence[words.TunedSite]
) -> None:
    """The end of a tuning, in the log and on the terminal."""
    seconds, n_replays = context.expenses.total().model_copy(), context.replays.n_replays
    # First: what follows takes the processor from the calls that it times.
    steps = context.replays.step_times()
    if steps is not None:
        # They have been written without, since a job may end before these calls.
        known = {"step_ms": (steps.before_ms, steps.after_ms)}
        sites = _written(
            context, {label: record.model_copy(update=known) for label, record in records.items()}
        )
    n_again = context.replays.n_run_again
    again = f", {n_again} of them run again" if n_again else ""
    told = words.outcome(
        context.name,
        [each.record for each in sites],
        seconds.total,
        steps.ranks_ms if steps is not None else None,
    )
    context.story.info(told, shown=True)
    for line in [
        *words.site_lines(sites, has_numbers=True),
        *(row for each in sites for row in words.table_rows(each)),
        f"took {words.took(seconds, n_replays)}{again}",
    ]:
        context.story.info(line)
    # Without one a warning has said so.
    context.story.terminal.show(words.page(sites, has_log=os.access(context.story.path, os.W_OK)))
