"""From what was agreed to what is kept: the record of a site, and its table in the log.

Pure but for the log it writes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dist_tune.engine import Standing
from dist_tune.records import CandidateRecord, TuningRecord, environment
from dist_tune.sites import Site
from dist_tune.space import config_fields

if TYPE_CHECKING:
    import loguru


def make_record(
    closure: str, label: str, texts: list[str], site: Site | None, standings: Sequence[Standing], winner: int,
    *, n_replays: int, seconds: float, world_size: int,
) -> TuningRecord:  # fmt: skip
    """The record of one site; ``site`` is None on a rank that never met it and knows only what the others told."""
    candidates = []
    for index, (text, standing) in enumerate(zip(texts, standings, strict=True)):
        resources = site.resources.get(index) if site is not None else None
        candidates.append(
            CandidateRecord(
                index=index,
                config=text,
                fields=config_fields(site.configs[index]) if site is not None else {},
                latency_ms=standing.latency_ms,
                spread_ms=standing.spread_ms,
                closure_ms=standing.closure_ms,
                rank_latencies_ms=standing.rank_latencies_ms,
                failure=standing.failure,
                shared_bytes=resources.shared_bytes if resources else None,
                n_regs=resources.n_regs if resources else None,
                n_spills=resources.n_spills if resources else None,
            )
        )
    return TuningRecord(
        closure=closure,
        kernel=site.kernel if site is not None else label.partition("[")[0],
        key=site.key if site is not None else "[" + label.partition("[")[2],
        winner=winner,
        candidates=candidates,
        n_replays=n_replays,
        seconds=seconds,
        environment=environment(world_size),
    )


def log_table(log: loguru.Logger, record: TuningRecord) -> None:
    """All candidates from fastest to slowest, then the dropped ones with the reason, then the winner."""
    site = record.kernel + record.key
    for each in sorted(record.candidates, key=lambda c: (c.failure is not None, c.latency_ms or float("inf"), c.index)):
        facts = f'config="{each.config}"'
        if each.shared_bytes is not None:
            facts = f"shared_bytes={each.shared_bytes} regs={each.n_regs} spills={each.n_spills} {facts}"
        if each.failure is not None:
            log.info(f"site={site} candidate={each.index} dropped: {each.failure} {facts}")
        elif each.latency_ms is None:
            log.info(f"site={site} candidate={each.index} not measured on all ranks {facts}")
        else:
            ranks_ms = " ".join(f"{rank}:{ms:.4f}" for rank, ms in each.rank_latencies_ms.items())
            log.info(
                f"site={site} candidate={each.index} kernel_ms={each.latency_ms:.4f} spread_ms={each.spread_ms:.4f} "
                f"closure_ms={each.closure_ms:.4f} ranks_ms=[{ranks_ms}] {facts}"
            )
    best = record.best
    n_dropped = sum(each.failure is not None for each in record.candidates)
    if best.latency_ms is None:
        why = "the only one that runs" if n_dropped == len(record.candidates) - 1 else "nothing was measured: no replay met this site"
        line = f'site={site} winner={best.index} ({why}) dropped={n_dropped} config="{best.config}"'
    else:
        fastest_ms, slowest = min(best.rank_latencies_ms.values()), max(best.rank_latencies_ms, key=best.rank_latencies_ms.__getitem__)
        line = (
            f"site={site} winner={best.index} kernel_ms={best.latency_ms:.4f} closure_ms={best.closure_ms:.4f} "
            f'fastest_rank_ms={fastest_ms:.4f} slowest_rank={slowest} dropped={n_dropped} replays={record.n_replays} config="{best.config}"'
        )
    log.bind(progress=True).info(line)
