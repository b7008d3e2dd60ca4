"""Words about records: times before and after, the reason of a choice, fates of the candidates, the
slowest rank, what a tuning took, where it was made.

Pure, and of records alone, so that the terminal, the log, reports, ``dist-tune show`` and ``diff``
say the same in the same words. Used by its name: ``words.facts(record)``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Any, NamedTuple

from dist_tune.log import amount, milliseconds, phase_told, site_names, table
from dist_tune.records.record import CandidateRecord, Environment, Seconds, TuningRecord
from dist_tune.search import NOT_TRIED

_MAX_LINES = 5
"""Sites that the terminal tells of."""
_TRIED = ("timed", "raced out", "not timed", "the same kernel as another", "failed")
_UNTRIED = ("not raced", "untried")
_HOOK = re.compile(r"\s*\b[\w.]*pre_hook=\S+")
_CAUSES = {
    "shared memory": "shared memory",
    "registers": r"\bregisters?\b",
    "wrong result": "result is wrong|changes its argument",
    "out of memory": "out of memory|OutOfMemory|MemoryError",
    "did not return": "until release= was called|has been compiling for",
    "ended the process": "process ended|quarantine",
    "slow on one rank": " s a launch, where rank ",
}
"""Cause in two or three words -> what its reasons have in them."""
_ALIKE = 5e-4
"""Difference that would read "0.0 %"."""
_TIMES = 1.1
"""Ratio from which it is told in times, and not in percent."""
_ERROR = re.compile(r"\b([A-Za-z_]\w*(?:Error|Exception|OutOfResources))\b")


# -- times -----------------------------------------------------------------------------------------


def faster(ratio: float) -> str:
    """A time over another one, of which the second is told: "23.9x faster", "3.0 % slower"."""
    share = max(ratio, 1 / ratio)
    if share - 1 < _ALIKE:
        return "as fast"
    size = f"{share:.3g}x" if share >= _TIMES else f"{100 * (share - 1):.1f} %"
    return f"{size} faster" if ratio > 1 else f"{size} slower"


def times(before_ms: float | None, after_ms: float | None) -> str:
    """Milliseconds before and after, as far as they are known: "266 -> 20.9 ms (12.7x faster)"."""
    if not after_ms:
        return "not timed"
    after = f"{milliseconds(after_ms)} ms"
    if not before_ms:
        return after
    return f"{milliseconds(before_ms)} -> {after} ({faster(before_ms / after_ms)})"


def launch_times(record: TuningRecord) -> str:
    """A launch with the first config and with the winner, on the slowest rank: "266 -> 20.9 ms
    (12.7x faster)", or why the first has no time: "20.9 ms (the first config cannot run here)".
    """
    first, best_ms = record.candidates[0], record.best.latency_ms
    if record.winner == 0:
        of_first = "the first config"
    elif first.failure is not None:
        of_first = "the first config cannot run here"
    elif first.latency_ms is None:
        of_first = "the first config was not timed"
    else:
        return times(first.latency_ms, best_ms)
    return f"{times(None, best_ms)} ({of_first})"


def step_times(records: Sequence[TuningRecord]) -> tuple[float | None, float | None]:
    """Milliseconds of the step with the first configs, and with the winners; None where a site was
    not timed.

    Of a step tuned online they are the job's own. Of several sites whose replays were timed, the
    differences that their first configs make are added up.
    """
    if records and records[0].step_ms is not None:
        return records[0].step_ms
    known_ms = [ms for record in records if (ms := _timed_step_ms(record.best)) is not None]
    if not records or len(known_ms) < len(records):
        return None, None
    # In the race others ran beside it.
    best_ms = max(min(known_ms), *(record.best.latency_ms or 0.0 for record in records))
    losses_ms = [ms for record in records if (ms := _loss_ms(record)) is not None]
    return (None if len(losses_ms) < len(records) else best_ms + sum(losses_ms)), best_ms


def _loss_ms(record: TuningRecord) -> float | None:
    """Milliseconds that the first config would add to the step; None where nothing tells.

    By the steps where both were timed to the end or in the finals. In the race the other sites try
    their own candidates, and what these add to the step is not this site's: there the kernels'
    times tell, of one launch a step.
    """
    first, best = record.candidates[0], record.best
    first_ms, best_ms = _timed_step_ms(first), _timed_step_ms(best)
    if first is best or first_ms is None or best_ms is None:
        return 0.0 if first is best else None
    if first.left is None or "finals" in first.left:
        return first_ms - best_ms
    loss_ms = (first.latency_ms or 0.0) - (best.latency_ms or 0.0)
    return loss_ms if loss_ms >= 0 else None  # a slower kernel in a faster step


def _timed_step_ms(each: CandidateRecord) -> float | None:
    return (
        None
        if each.closure_ms is None or each.latency_ms is None
        else max(each.closure_ms, each.latency_ms)
    )


def slowest_rank(ranks_ms: Mapping[int, float]) -> str:
    """The slowest rank, and by how much it is slower than the fastest: "3 (+2 %)"; empty where
    ranks are alike.
    """
    if len(ranks_ms) < 2 or min(ranks_ms.values()) <= 0:
        return ""
    slowest = max(ranks_ms, key=lambda rank: ranks_ms[rank])
    percent = 100 * (ranks_ms[slowest] / min(ranks_ms.values()) - 1)
    return f"{slowest} (+{percent:.0f} %)" if percent >= 1 else ""


# -- the choice ------------------------------------------------------------------------------------


def why_chosen(record: TuningRecord) -> str:
    """The reason of the choice, and the kernel beside the fastest other, with the noise, which is
    the ``spread_ms`` of both: "fastest step, next kernel 2.1 % slower (noise 0.7 %)".
    """
    best = record.best
    others = [
        candidate
        for candidate in record.candidates
        if candidate is not best
        and candidate.failure is None
        and candidate.equal_to is None
        and candidate.latency_ms
    ]
    parts = [record.reason]
    if others and best.latency_ms:
        near = min(others, key=lambda each: each.latency_ms or 0.0)
        noise_ms = (best.spread_ms or 0.0) + (near.spread_ms or 0.0)
        noise = f" (noise {100 * noise_ms / best.latency_ms:.1f} %)" if noise_ms else ""
        beside = faster(best.latency_ms / (near.latency_ms or 0.0))
        other = "fastest kernel" if "faster" in beside else "next kernel"
        parts.append(f"{other} {beside}{noise}")
    return ", ".join(filter(None, parts))


def weighing(record: TuningRecord) -> str:
    """Weight of differences of the step's time beside those of the kernel, in words; empty where it
    was 1, or there was one finalist.
    """
    n_finalists = sum(
        candidate.left is None and candidate.failure is None and candidate.closure_ms is not None
        for candidate in record.candidates
    )
    if n_finalists < 2 or record.closure_weight >= 1.0:
        return ""
    return f"{100 * record.closure_weight:.0f} % beside the kernel's, as the step varies by itself"


def why_not(each: CandidateRecord, record: TuningRecord) -> str:
    """The reason why a candidate is not the winner, of a finalist by how much it lost; for the
    winner the reason of the choice.
    """
    best = record.best
    if each is best:
        return ": ".join(filter(None, ["winner", record.reason]))
    if each.equal_to is not None and each.failure is None:
        return f"the same kernel as candidate {each.equal_to}"
    if (reason := each.failure or each.left) is not None:
        return reason
    if not each.latency_ms or not best.latency_ms:
        return "not measured on all ranks"
    told = f"not chosen: kernel {faster(best.latency_ms / each.latency_ms)}"
    if each.closure_ms is None or best.closure_ms is None:
        return told
    return f"{told}, step {each.closure_ms - best.closure_ms:+.4f} ms"


def fates(record: TuningRecord) -> str:
    """What became of the candidates: "216 tried: 4 in the finals, 144 raced out, 68 cannot run here
    (shared memory)".
    """
    counts = Counter(_fate(candidate) for candidate in record.candidates)
    failures = Counter(
        _cause(candidate.failure)
        for candidate in record.candidates
        if candidate.failure is not None
    )
    causes = ", ".join(
        f"{n} {cause}" if len(failures) > 1 else cause for cause, n in failures.most_common()
    )
    words = {"failed": f"cannot run here ({causes})"} | (
        {"timed": "in the finals"} if counts["raced out"] else {}
    )
    told = ", ".join(
        f"{counts[fate]} {words.get(fate, fate)}" for fate in (*_TRIED, *_UNTRIED) if counts[fate]
    )
    return f"{sum(counts[fate] for fate in _TRIED)} tried: {told}"


def _fate(each: CandidateRecord) -> str:
    if each.failure is not None:
        return "failed"
    if each.equal_to is not None:
        return "the same kernel as another"
    if each.left == NOT_TRIED:
        return "untried"
    # Compiled, and then left out by the budget or by earlier times.
    if each.left is not None and each.left.startswith("not raced"):
        return "not raced"
    if each.latency_ms is None:
        return "not timed"
    return "timed" if each.left is None else "raced out"


def _cause(failure: str) -> str:
    """A failure in two or three words, by which failures are counted."""
    error = _ERROR.search(failure)
    return next(
        (name for name, words in _CAUSES.items() if re.search(words, failure)),
        error[1] if error else "other reasons",
    )


# -- configs ---------------------------------------------------------------------------------------


def short_config(each: CandidateRecord) -> str:
    """A config without its hook, whose name says nothing of its speed."""
    return _HOOK.sub("", each.config)


def _differing(candidates: Sequence[CandidateRecord]) -> list[str]:
    """Names of the fields in which candidates differ, hooks left out; empty where the fields of one
    are not known.
    """
    if not all(candidate.fields for candidate in candidates):
        return []
    names = dict.fromkeys(
        name
        for candidate in candidates
        for name in candidate.fields
        if not name.endswith("pre_hook")
    )
    return [
        name
        for name in names
        if len({str(candidate.fields.get(name)) for candidate in candidates}) > 1
    ]


def own_and_shared(record: TuningRecord) -> tuple[str, str]:
    """The winner's config in two parts: the fields in which the candidates differ, and those that
    are the same for all; all in the first where there is one candidate, or fields are not known.
    """
    names = _differing(record.candidates)
    if not names:
        return short_config(record.best), ""
    own, shared = list[str](), list[str]()
    for name, value in record.best.fields.items():
        if not name.endswith("pre_hook"):
            (own if name in names else shared).append(f"{name}={value}")
    return " ".join(own) or short_config(record.best), " ".join(shared)


# -- a site ----------------------------------------------------------------------------------------


class TunedSite(NamedTuple):
    """A site with its config."""

    number: int
    """In the log, or in the report."""
    record: TuningRecord
    record_id: str = ""
    """As ``dist-tune show`` takes it; empty where no record is kept."""


def names(sites: Sequence[TunedSite]) -> list[str]:
    """Of each site, by its kernel and key; no two are alike."""
    return site_names(
        [(site.record.kernel, site.record.key) for site in sites],
        [f"{site.record.kernel} {site.record.key} (site {site.number})" for site in sites],
    )


def facts(record: TuningRecord) -> dict[str, str]:
    """All that there is to say of a site, heading -> text, without what there is not."""
    told = {
        "winner": short_config(record.best),
        "kernel": launch_times(record),
        "step": times(None, record.best.closure_ms),
        "chosen": why_chosen(record),
        "weight of the step": weighing(record),
        "candidates": fates(record),
        "slowest rank": slowest_rank(record.best.rank_latencies_ms),
        "all with": own_and_shared(record)[1],
    }
    return {heading: text for heading, text in told.items() if text}


def candidate_rows(record: TuningRecord, *, has_ranks: bool = False) -> list[dict[str, Any]]:
    """The table of a site: heading -> value, the fastest candidate first, each with its reason.

    ``has_ranks``: with the time on each rank.
    """
    differing, best_ms = _differing(record.candidates), record.best.latency_ms
    ranks = sorted(
        {rank for candidate in record.candidates for rank in candidate.rank_latencies_ms}
    )
    rows = []
    for candidate in sorted(
        record.candidates,
        key=lambda one: (one.failure is not None, one.latency_ms or float("inf"), one.index),
    ):
        row: dict[str, Any] = {"#": candidate.index, "ms": candidate.latency_ms, "x winner": None}
        if candidate.latency_ms and best_ms:
            row["x winner"] = f"{candidate.latency_ms / best_ms:.2f}"
        row |= {
            "+/- ms": candidate.known_spread_ms,
            "step ms": candidate.closure_ms,
            "timed": candidate.n_replays or None,
        }
        if has_ranks and len(ranks) > 1:
            row |= {f"rank {rank}": candidate.rank_latencies_ms.get(rank) for rank in ranks}
        row |= {"registers": candidate.n_regs, "spills": candidate.n_spills, "shared KiB": None}
        if candidate.shared_bytes is not None:
            row["shared KiB"] = f"{candidate.shared_bytes / 1024:.4g}"
        if 0 < len(differing) <= 12:
            row |= {name: str(candidate.fields.get(name, "")) for name in differing}
        else:
            row["config"] = short_config(candidate)
        reason = why_not(candidate, record)
        row["why"] = reason if candidate.failure is None else f"dropped: {reason}"
        rows.append(row)
    return rows


def table_rows(site: TunedSite) -> list[str]:
    """All of a site, for the log: its facts, then all candidates from fastest to slowest, then
    those without a time, then the dropped ones, with reasons.
    """
    record = site.record
    return [
        f"site {site.number} = {record.kernel}{record.key}",
        *(f"  {heading}: {text}" for heading, text in facts(record).items()),
        *(f"  {line}" for line in table(candidate_rows(record, has_ranks=True))),
    ]


def site_lines(sites: Sequence[TunedSite], *, has_numbers: bool = False) -> list[str]:
    """A line for each site: name, its launch before and after, config and reason."""
    rows = [
        {
            "number": f"site {site.number}" if has_numbers else "",
            "name": name,
            "time": launch_times(site.record),
            "config": own_and_shared(site.record)[0],
            "why": why_chosen(site.record),
        }
        for site, name in zip(sites, names(sites), strict=True)
    ]
    return [f"  {line}" for line in table(rows, has_header=False)]


# -- a tuning --------------------------------------------------------------------------------------


def outcome(
    name: str,
    records: Sequence[TuningRecord],
    seconds: float,
    ranks_ms: Mapping[int, float] | None = None,
) -> str:
    """The step before and after, what the tuning took, and its slowest rank: one line.

    ``ranks_ms``: rank -> milliseconds of calls, which tell the slowest rank in place of the
    winners' launches.
    """
    launches_ms = Counter[int]()
    for record in records:
        launches_ms.update(record.best.rank_latencies_ms)
    slowest = slowest_rank(launches_ms if ranks_ms is None else ranks_ms)
    told = f"{name} {times(*step_times(records))}, tuned in {seconds:.1f} s"
    return f"{told}; slowest rank {slowest}" if slowest else told


def page(sites: Sequence[TunedSite], *, has_log: bool) -> list[str]:
    """The last lines of a tuning on the terminal: the sites that take longest, how many there are
    besides, and where to read on.
    """
    slowest = sorted(sites, key=lambda each: -(each.record.best.latency_ms or 0.0))
    lines = site_lines(slowest[:_MAX_LINES])
    if len(sites) > _MAX_LINES:
        lines.append(f"  and {len(sites) - _MAX_LINES} more")
    further = [f"why: dist-tune show {each.record_id}" for each in slowest if each.record_id][:1]
    if has_log:
        further.append("report: dist-tune report")
    if further:
        lines.append(f"  {'   '.join(further)}")
    return lines


def took(spent: Seconds, n_replays: int) -> str:
    """Seconds of a tuning by phase, then those of waits and of compilation, which are parts of
    these: "10.00 s (discover 1.00, race 7.00, waits 3.00), 90 replays".
    """
    parts = ", ".join(
        f"{phase_told(name)} {seconds:.2f}"
        for name, seconds in spent
        if name != "total" and seconds >= 0.005
    )
    return f"{spent.total:.2f} s ({parts}), {amount(n_replays, 'replay')}"


def made_on(where: Environment) -> str:
    """Ranks and devices: "4 ranks on 4 x NVIDIA H200"."""
    ranks = amount(where.world_size, "rank")
    if where.ranks_per_host != where.world_size:
        ranks += f", {where.ranks_per_host} per host,"
    if where.device_count:
        return f"{ranks} on {where.device_count} x {where.device}"
    return f"{ranks} on {where.device} without a GPU"


def origin(records: Sequence[TuningRecord]) -> dict[str, str]:
    """Date and versions of the last record, ranks and devices of all: heading -> text."""
    last = records[-1]
    where = last.environment
    # Of other GPUs it has its name.
    runtime = where.cuda if " " in (where.cuda or "") else f"CUDA {where.cuda or 'none'}"
    return {
        "tuned": f"{last.tuned_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "on": ", ".join(dict.fromkeys(made_on(record.environment) for record in records)),
        "versions": (
            f"Python {where.python}, torch {where.torch}, triton {where.triton}, {runtime}"
        ),
    }
