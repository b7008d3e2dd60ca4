"""Words about a record: gain, lead, fates of the candidates, the reason why each is out, the slowest rank, the step before and after.

Pure, and of the record alone, so that the terminal, the log, reports and ``dist-tune show`` tell the same of one tuning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dist_tune.cache.records import CandidateRecord, TuningRecord
from dist_tune.search import NOT_TRIED

ID_CHARS = 6
"""Characters of a record's file name that name it in messages; ``dist-tune show`` takes any beginning that is unique."""
_HOOK = re.compile(r"\s*\b[\w.]*pre_hook=\S+")
_NUMBERED = re.compile(r" \(#\d+\)$")
_RANK = re.compile(r"^(?:rank \d+: |the same kernel as candidate \d+: )+")
_CAUSES = {
    "shared memory": r"shared memory",
    "registers": r"\bregisters?\b",
    "wrong result": r"result is wrong|changes its argument",
    "out of memory": r"out of memory|OutOfMemory|MemoryError",
    "did not return": r"until release= was called|has been compiling for",
    "ended the process": r"process ended|quarantine",
    "slow on one rank": r" s a launch, where rank ",
}
_ERROR = re.compile(r"\b([A-Za-z_]\w*(?:Error|Exception|OutOfResources))\b")


class Fates(NamedTuple):
    """The candidates of a site by their fate."""

    text: str
    """In words: "216 tried: 4 in the finals, 144 raced out, 68 cannot run here (shared memory)"."""
    failures: Counter[str]
    """Cause -> candidates that cannot run."""


def fates(record: TuningRecord) -> Fates:
    """The candidates by fate."""
    failures = Counter(cause(each.failure) for each in record.candidates if each.failure is not None)
    causes = ", ".join(f"{n} {what}" if len(failures) > 1 else what for what, n in failures.most_common())
    counts = Counter(map(_fate, record.candidates))
    names = {"failed": f"cannot run here ({causes})", "timed": "in the finals" if counts["raced out"] else "timed"}
    order = ("timed", "raced out", "not timed", "the same kernel as another", "failed", "not raced", "untried")
    told = ", ".join(f"{counts[fate]} {names.get(fate, fate)}" for fate in order if counts[fate])
    return Fates(f"{len(record.candidates) - counts['not raced'] - counts['untried']} tried: {told}", failures)


def _fate(each: CandidateRecord) -> str:
    if each.failure is not None:
        return "failed"
    if each.equal_to is not None:
        return "the same kernel as another"
    if each.left is not None and (each.left == NOT_TRIED or each.left.startswith("not raced")):  # by the budget, or by earlier times
        return "untried" if each.left == NOT_TRIED else "not raced"
    if each.latency_ms is None:
        return "not timed"
    return "timed" if each.left is None else "raced out"


def cause(failure: str) -> str:
    """A failure in two or three words, by which failures are counted."""
    reason = _RANK.sub("", failure)
    if known := next((name for name, pattern in _CAUSES.items() if re.search(pattern, reason)), None):
        return known
    error = _ERROR.search(reason)
    return error[1] if error else "other reasons"


def gain(record: TuningRecord) -> float | None:
    """Time of the first config over the winner's; None where one of them was not timed."""
    first_ms, best_ms = record.candidates[0].latency_ms, record.best.latency_ms
    return first_ms / best_ms if first_ms is not None and best_ms else None


def lead(record: TuningRecord) -> float | None:
    """Share of its time by which the winner's kernel is ahead of the fastest other; negative if behind, None without another."""
    best_ms, others = record.best.latency_ms, [each for each in record.candidates if each.failure is None and each.equal_to is None]
    others_ms = [each.latency_ms for each in others if each.index != record.winner and each.latency_ms is not None]
    return min(others_ms) / best_ms - 1.0 if others_ms and best_ms else None


def weighing(record: TuningRecord) -> str:
    """Weight of differences of the step's time beside those of the kernel, in words; empty where it was 1, or there was one finalist."""
    n_finalists = sum(each.left is None and each.failure is None and each.closure_ms is not None for each in record.candidates)
    if n_finalists < 2 or record.closure_weight >= 1.0:
        return ""
    return f"the rest of the step counted by {100 * record.closure_weight:.0f} %, the less the more it varies by itself"


def why_not(each: CandidateRecord, record: TuningRecord) -> str:
    """The reason why a candidate is not the winner, of a finalist by how much it lost; for the winner the reason of the choice."""
    if each.index == record.winner:
        return ": ".join(filter(None, ["winner", record.reason]))
    if reason := each.failure or (f"the same kernel as candidate {each.equal_to}" if each.equal_to is not None else each.left):
        return reason
    best = record.best
    if each.latency_ms is None or not best.latency_ms:
        return "not measured on all ranks"
    told = f"not chosen: {each.latency_ms / best.latency_ms - 1:+.1%} by its kernel"
    if each.closure_ms is None or best.closure_ms is None:
        return told
    # As in the table; beside it the part of the difference that counted, where that is another number.
    step_ms, kernel_ms = each.closure_ms - best.closure_ms, each.latency_ms - best.latency_ms
    measured, counted = f"{step_ms:+.4f} ms", f"{kernel_ms + record.closure_weight * (step_ms - kernel_ms):+.4f} ms"
    return f"{told}, {measured} by the step" + (f", counted as {counted}" if counted != measured else "")


def skew(record: TuningRecord) -> tuple[int, float] | None:
    """The slowest rank with the winner, and the share by which it is slower than the fastest; None with a single rank."""
    ranks_ms = record.best.rank_latencies_ms
    if len(ranks_ms) < 2 or min(ranks_ms.values()) <= 0:
        return None
    slowest = max(ranks_ms, key=ranks_ms.__getitem__)
    return slowest, ranks_ms[slowest] / min(ranks_ms.values()) - 1.0


def step_times(records: Sequence[TuningRecord]) -> tuple[float | None, float | None]:
    """Milliseconds of the step with the first configs, and with the winners; None where a site was not timed.

    Of several sites the differences that their first configs make are added up.
    """
    known_ms = [ms for each in records if (ms := _step_ms(each.best)) is not None]
    if not records or len(known_ms) < len(records):
        return None, None
    losses_ms = [ms for each in records if (ms := _loss_ms(each)) is not None]
    return (None if len(losses_ms) < len(records) else max(known_ms) + sum(losses_ms)), max(known_ms)


def _step_ms(each: CandidateRecord) -> float | None:
    return None if each.closure_ms is None or each.latency_ms is None else max(each.closure_ms, each.latency_ms)


def _loss_ms(record: TuningRecord) -> float | None:
    """Milliseconds that the first config would add to the step; None where nothing tells.

    By the steps where both were timed to the end or in the finals. In the race the other sites try their own candidates, and what these
    add to the step is not this site's: there the kernels' times tell, of one launch a step.
    """
    first, best = record.candidates[0], record.best
    first_ms, best_ms = _step_ms(first), _step_ms(best)
    if first.index == best.index:
        return 0.0
    if first_ms is None or best_ms is None:
        return None
    if first.left is None or "finals" in first.left:
        return first_ms - best_ms
    loss_ms = (first.latency_ms or 0.0) - (best.latency_ms or 0.0)
    return loss_ms if loss_ms >= 0 else None  # a slower kernel in a faster step


def short_config(each: CandidateRecord) -> str:
    """A config without its hook, whose name says nothing of its speed."""
    if not each.fields:
        return _HOOK.sub("", each.config)
    numbered = _NUMBERED.search(each.config)
    return " ".join(f"{name}={each.fields[name]}" for name in _names(each)) + (numbered[0] if numbered else "")


def differing(candidates: Sequence[CandidateRecord]) -> list[str]:
    """Names of the fields in which candidates differ, hooks left out; empty where the fields of one are not known."""
    if not all(each.fields for each in candidates):
        return []
    names = dict.fromkeys(name for each in candidates for name in _names(each))
    return [name for name in names if len({str(each.fields.get(name)) for each in candidates}) > 1]


def _names(each: CandidateRecord) -> list[str]:
    return [name for name in each.fields if name.rpartition(".")[2] != "pre_hook"]
