"""From what was agreed to what is kept: the record of a site, and its table in the log.

Pure but for the log it writes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dist_tune.cache import CandidateRecord, Environment, Seconds, TuningRecord
from dist_tune.configs import config_fields
from dist_tune.search import CandidateResult, Selection
from dist_tune.tuning.site import Site

if TYPE_CHECKING:
    import loguru


def make_record(
    closure: str, label: str, texts: list[str], site: Site | None, results: Sequence[CandidateResult], winner: int,
    *, verdict: Selection | None, n_replays: int, seconds: Seconds, meeting_seconds: list[float], where: Environment,
) -> TuningRecord:  # fmt: skip
    """The record of one site; ``site`` is None on a rank that never met it and knows only what the others told."""
    candidates = []
    for index, (text, standing) in enumerate(zip(texts, results, strict=True)):
        resources = site.resources.get(index) if site is not None else None
        agreed = standing.agreed
        candidates.append(
            CandidateRecord(
                index=index,
                config=text,
                fields=config_fields(site.configs[index]) if site is not None else {},
                latency_ms=agreed.kernel_ms if agreed else None,
                spread_ms=agreed.spread_ms if agreed else None,
                closure_ms=agreed.closure_ms if agreed else None,
                n_replays=agreed.n_replays if agreed else 0,
                rank_latencies_ms=agreed.rank_latencies_ms if agreed else {},
                failure=standing.failure,
                left=standing.left,
                shared_bytes=resources.shared_bytes if resources else None,
                n_regs=resources.n_regs if resources else None,
                n_spills=resources.n_spills if resources else None,
            )
        )
    return TuningRecord(
        closure=closure,
        kernel=site.kernel if site is not None else label.partition("[")[0],
        key=site.key if site is not None else "[" + label.partition("[")[2].rpartition("]")[0] + "]",
        source=site.source if site is not None else "",
        winner=winner,
        candidates=candidates,
        n_replays=n_replays,
        closure_weight=verdict.closure_weight if verdict else 0.0,
        seconds=seconds.total,
        spent=seconds,
        meeting_seconds=meeting_seconds,
        environment=where,
    )


def log_table(log: loguru.Logger, record: TuningRecord) -> None:
    """All candidates from fastest to slowest, then the dropped ones with the reason, then the winner."""
    site = record.kernel + record.key
    for each in sorted(record.candidates, key=lambda c: (c.failure is not None, c.latency_ms or float("inf"), c.index)):
        facts = f'config="{each.config}"'
        if each.shared_bytes is not None:
            known = {"shared_bytes": each.shared_bytes, "regs": each.n_regs, "spills": each.n_spills}
            facts = " ".join(f"{name}={value}" for name, value in known.items() if value is not None) + f" {facts}"
        if each.failure is not None:
            log.info(f"site={site} candidate={each.index} dropped: {each.failure} {facts}")
        elif each.latency_ms is None:
            log.info(f"site={site} candidate={each.index} not measured on all ranks {facts}")
        else:
            ranks_ms = " ".join(f"{rank}:{ms:.4f}" for rank, ms in each.rank_latencies_ms.items())
            log.info(
                f"site={site} candidate={each.index} kernel_ms={each.latency_ms:.4f} spread_ms={each.spread_ms:.4f} "
                f"closure_ms={each.closure_ms:.4f} replays={each.n_replays} ranks_ms=[{ranks_ms}] {facts}"
                + (f" ({each.left})" if each.left else "")
            )
    best = record.best
    n_dropped = sum(each.failure is not None for each in record.candidates)
    n_left = sum(each.left is not None for each in record.candidates)
    if best.latency_ms is None:
        why = "the only one that runs" if n_dropped == len(record.candidates) - 1 else "nothing was measured: no replay met this site"
        line = f'site={site} winner={best.index} ({why}) dropped={n_dropped} config="{best.config}"'
    else:
        fastest_ms, slowest = min(best.rank_latencies_ms.values()), max(best.rank_latencies_ms, key=best.rank_latencies_ms.__getitem__)
        line = (
            f"site={site} winner={best.index} kernel_ms={best.latency_ms:.4f} closure_ms={best.closure_ms:.4f} "
            f"fastest_rank_ms={fastest_ms:.4f} slowest_rank={slowest} closure_weight={record.closure_weight:.2f} dropped={n_dropped} "
            f'raced_out={n_left} replays={record.n_replays} config="{best.config}"'
        )
    log.bind(progress=True).info(line)
