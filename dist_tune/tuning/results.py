"""The record of a tuned site, and its table in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_tune.cache import CandidateRecord, Environment, TuningRecord
from dist_tune.configs import config_fields
from dist_tune.search import NOT_TRIED, CandidateResult
from dist_tune.tuning.context import TuningContext
from dist_tune.tuning.site import Site

if TYPE_CHECKING:
    from dist_tune.logger import Logger


def make_record(context: TuningContext, label: str, where: Environment) -> TuningRecord:
    """The record of one site; a rank that never met the site knows only what the others reported."""
    site, race = context.sites.met.get(label), context.race
    texts, results = context.entries[label].texts, race.results(label)
    winner, selection = race.best(label), race.selection(label)
    assert winner is not None
    return TuningRecord(
        closure=context.name,
        kernel=site.kernel if site is not None else label.partition("[")[0],
        key=site.key if site is not None else "[" + label.partition("[")[2].rpartition("]")[0] + "]",
        source=site.source if site is not None else "",
        not_followed=site.not_followed if site is not None else [],
        winner=winner,
        candidates=[_candidate(i, text, each, site) for i, (text, each) in enumerate(zip(texts, results, strict=True))],
        n_replays=context.replays.n_replays,
        n_variants=context.replays.trials.variants.counts.get(label, 1),
        closure_weight=selection.closure_weight if selection else 0.0,
        seconds=context.expenses.seconds.total,
        spent=context.expenses.seconds,
        meeting_seconds=context.expenses.meetings,
        environment=where,
    )


def _candidate(index: int, text: str, result: CandidateResult, site: Site | None) -> CandidateRecord:
    resources = site.resources.get(index) if site is not None else None
    times = result.times
    return CandidateRecord(
        index=index,
        config=text,
        fields=config_fields(site.configs[index]) if site is not None else {},
        latency_ms=times.kernel_ms if times else None,
        spread_ms=times.spread_ms if times else None,
        closure_ms=times.closure_ms if times else None,
        n_replays=times.n_replays if times else 0,
        rank_latencies_ms=times.rank_latencies_ms if times else {},
        failure=result.failure,
        left=result.left,
        equal_to=result.equal_to,
        shared_bytes=resources.shared_bytes if resources else None,
        n_regs=resources.n_regs if resources else None,
        n_spills=resources.n_spills if resources else None,
    )


def log_table(log: Logger, record: TuningRecord) -> None:
    """All candidates from fastest to slowest, then the dropped ones with the reason, then the winner."""
    site = record.kernel + record.key
    for each in sorted(record.candidates, key=lambda c: (c.failure is not None, c.latency_ms or float("inf"), c.index)):
        facts = f'config="{each.config}"'
        if each.shared_bytes is not None:
            known = {"shared_bytes": each.shared_bytes, "regs": each.n_regs, "spills": each.n_spills}
            facts = " ".join(f"{name}={value}" for name, value in known.items() if value is not None) + f" {facts}"
        if each.failure is not None:
            log.info(f"site={site} candidate={each.index} dropped: {each.failure} {facts}")
        elif each.equal_to is not None:
            log.info(f"site={site} candidate={each.index} the same kernel as candidate {each.equal_to} {facts}")
        elif each.latency_ms is None:
            log.info(f"site={site} candidate={each.index} {each.left or 'not measured on all ranks'} {facts}")
        else:
            ranks_ms = " ".join(f"{rank}:{ms:.4f}" for rank, ms in each.rank_latencies_ms.items())
            log.info(
                f"site={site} candidate={each.index} kernel_ms={each.latency_ms:.4f} spread_ms={each.spread_ms:.4f} "
                f"closure_ms={each.closure_ms:.4f} replays={each.n_replays} ranks_ms=[{ranks_ms}] {facts}"
                + (f" ({each.left})" if each.left else "")
            )
    best = record.best
    n_dropped = sum(each.failure is not None for each in record.candidates)
    n_untried = sum(each.left == NOT_TRIED for each in record.candidates)
    n_left = sum(each.left is not None for each in record.candidates) - n_untried
    n_equal = sum(each.equal_to is not None and each.failure is None for each in record.candidates)
    if best.latency_ms is None:
        n_others = len(record.candidates) - 1
        left = next((each.left for each in record.candidates if each.left), "nothing was measured: no replay met this site")
        why = "the only one that runs" if n_dropped + n_equal == n_others else left
        line = f'site={site} winner={best.index} ({why}) dropped={n_dropped} config="{best.config}"'
    else:
        fastest_ms, slowest = min(best.rank_latencies_ms.values()), max(best.rank_latencies_ms, key=best.rank_latencies_ms.__getitem__)
        line = (
            f"site={site} winner={best.index} kernel_ms={best.latency_ms:.4f} closure_ms={best.closure_ms:.4f} "
            f"fastest_rank_ms={fastest_ms:.4f} slowest_rank={slowest} closure_weight={record.closure_weight:.2f} dropped={n_dropped} "
            f"raced_out={n_left} {f'untried={n_untried} ' if n_untried else ''}{f'equal={n_equal} ' if n_equal else ''}"
            f'replays={record.n_replays} config="{best.config}"'
        )
    log.bind(progress=True).info(line)
