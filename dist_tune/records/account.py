"""Words about a record: gain, lead, fates of the candidates, the reason why each is out, the
slowest rank, the step before and after.

Pure, and of the record alone, so that the terminal, the log, reports and ``dist-tune show`` tell
the same of one tuning. Used by its name: ``account.gain(record)``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dist_tune.log import milliseconds
from dist_tune.records.record import CandidateRecord, TuningRecord
from dist_tune.search import NOT_TRIED

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
"""Lead below which there is none."""
_TIMES = 1.1
"""Gain from which it is told in times, and not in percent."""
_AS_FAST = 0.995
"""Gain from which the winner is not slower."""
_ERROR = re.compile(r"\b([A-Za-z_]\w*(?:Error|Exception|OutOfResources))\b")


def fates(record: TuningRecord) -> str:
    """What became of the candidates: "216 tried: 4 in the finals, 144 raced out, 68 cannot run here
    (shared memory)".
    """
    counts = Counter(_fate(each) for each in record.candidates)
    failures = Counter(
        _cause(each.failure) for each in record.candidates if each.failure is not None
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


def gain(record: TuningRecord) -> float | None:
    """Time of the first config over the winner's; None where one of them was not timed."""
    first_ms, best_ms = record.candidates[0].latency_ms, record.best.latency_ms
    return first_ms / best_ms if first_ms is not None and best_ms else None


def faster(ratio: float, other: str = "", by_what: str = "") -> str:
    """A time before over that after: "23.9x faster", "as fast as before", "3 % slower"; beside
    ``other``: "8 % faster than other".
    """
    if abs(ratio - 1) < 1 - _AS_FAST:
        return f"as fast as {other or 'before'}"
    share = max(ratio, 1 / ratio) - 1  # of the shorter time: twice as long is 100 % slower
    amount = f"{ratio:.3g}x" if ratio >= _TIMES else f"{100 * share:.0f} %"
    than = f" than {other}" if other else ""
    return f"{amount} {'faster' if ratio > 1 else 'slower'}{by_what}{than}"


def before_and_after(record: TuningRecord) -> str:
    """A launch with the first config and with the winner, on the slowest rank: "266 -> 20.9 ms"."""
    first, best = record.candidates[0], record.best
    if best.latency_ms is None:
        return "not timed"
    after = f"{milliseconds(best.latency_ms)} ms"
    if first is best or first.latency_ms is None:
        return after
    return f"{milliseconds(first.latency_ms)} -> {after}"


def chosen_fields(record: TuningRecord) -> str:
    """The winner's config by the fields in which the candidates differ: all of it where there is
    one candidate, or fields are not known.
    """
    names = differing(record.candidates)
    return " ".join(f"{name}={record.best.fields.get(name)}" for name in names) or short_config(
        record.best
    )


def why_chosen(record: TuningRecord) -> str:
    """Reason of the choice, lead over the next, and what is to be said of the first config:
    "fastest step, 10 % ahead of the next".
    """
    first, ratio = record.candidates[0], gain(record)
    is_slower = ratio is not None and ratio < _AS_FAST and record.reason.startswith("fastest step")
    reason = f"{record.reason}, though its kernel is slower" if is_slower else record.reason
    parts = [reason, lead_told(record)]
    if len(record.candidates) > 1 and first.failure is not None:
        parts.append("the first config cannot run here")
    elif len(record.candidates) > 1 and record.winner == 0:
        parts.append("the first config")
    return ", ".join(filter(None, parts))


def gain_told(record: TuningRecord) -> str:
    """The winner beside the first config: "1.43x faster than the first config (0.209 ms)", or why
    there is none; empty for a single one.
    """
    first, ratio = record.candidates[0], gain(record)
    if record.winner == 0:
        return "the first config" if len(record.candidates) > 1 else ""
    if ratio is not None:
        by_what = " by its kernel" if ratio < _AS_FAST else ""
        gained = faster(ratio, "the first config", by_what)
        return f"{gained} ({milliseconds(first.latency_ms or 0.0)} ms)"
    if first.failure is not None:
        return "the first config cannot run here"
    return "the first config was not timed" if first.latency_ms is None else ""


def lead(record: TuningRecord) -> tuple[float, float] | None:
    """By how much the winner's kernel is ahead of the fastest other, negative if behind, and the
    noise; None without another.

    Both are shares of the winner's time. Noise: the ``spread_ms`` of both, added.
    """
    best = record.best
    others = [
        each
        for each in record.candidates
        if each is not best and each.failure is None and each.equal_to is None
    ]
    times = [
        (each.latency_ms, each.spread_ms or 0.0) for each in others if each.latency_ms is not None
    ]
    if not (times and best.latency_ms):
        return None
    next_ms, spread_ms = min(times)
    return next_ms / best.latency_ms - 1.0, ((best.spread_ms or 0.0) + spread_ms) / best.latency_ms


def lead_told(record: TuningRecord) -> str:
    """The winner beside the fastest other: "2.1 % ahead of the next", "4.6x faster than the next",
    "8.0 % behind the fastest kernel".
    """
    if (found := lead(record)) is None:
        return ""
    ahead, _ = found
    if ahead >= 1:
        return f"{1 + ahead:.1f}x faster than the next"
    if abs(ahead) < _ALIKE:
        return "as fast as the next"
    return (
        f"{100 * abs(ahead):.1f} %"
        f" {'ahead of the next' if ahead >= 0 else 'behind the fastest kernel'}"
    )


def confidence(record: TuningRecord) -> str:
    """The lead beside the noise: "2.1 % ahead of the next, 3.0 x the noise"."""
    if (found := lead(record)) is None:
        return "nothing to compare with"
    ahead, noise = found
    if abs(ahead) <= noise:
        return f"{lead_told(record)}, within the noise ({100 * noise:.1f} %)"
    return (
        f"{lead_told(record)}, {abs(ahead) / noise:.1f} x the noise" if noise else lead_told(record)
    )


def weighing(record: TuningRecord) -> str:
    """Weight of differences of the step's time beside those of the kernel, in words; empty where it
    was 1, or there was one finalist.
    """
    n_finalists = sum(
        each.left is None and each.failure is None and each.closure_ms is not None
        for each in record.candidates
    )
    if n_finalists < 2 or record.closure_weight >= 1.0:
        return ""
    return (
        f"the step's time weighs {100 * record.closure_weight:.0f} % beside the kernel's, because"
        " the step varies by itself"
    )


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
    if each.latency_ms is None or not best.latency_ms:
        return "not measured on all ranks"
    told = f"not chosen: {each.latency_ms / best.latency_ms - 1:+.1%} by its kernel"
    both = each.closure_ms is not None and best.closure_ms is not None
    return told + (
        f", {(each.closure_ms or 0.0) - (best.closure_ms or 0.0):+.4f} ms by the step"
        if both
        else ""
    )


def slowest_rank(records: Sequence[TuningRecord]) -> str:
    """The slowest rank with the winners, and by how much it is slower than the fastest: "rank 3 (+2
    %)"; empty where ranks are alike.
    """
    ranks_ms = Counter[int]()
    for each in records:
        ranks_ms.update(each.best.rank_latencies_ms)
    return slowest_of(ranks_ms)


def slowest_of(ranks_ms: Mapping[int, float]) -> str:
    """The same of times by rank."""
    if len(ranks_ms) < 2 or min(ranks_ms.values()) <= 0:
        return ""
    slowest = max(ranks_ms, key=lambda rank: ranks_ms[rank])
    percent = 100 * (ranks_ms[slowest] / min(ranks_ms.values()) - 1)
    return f"rank {slowest} (+{percent:.0f} %)" if percent >= 1 else ""


def facts(record: TuningRecord) -> dict[str, str]:
    """All that there is to say of a site, heading -> text, for page, text and ``dist-tune show``;
    without what there is not.
    """
    times_ms = {"kernel": record.best.latency_ms, "step": record.best.closure_ms}
    measured = [
        f"{name} {milliseconds(ms)} ms" for name, ms in times_ms.items() if ms is not None
    ] or ["not timed"]
    told = {
        "winner": short_config(record.best),
        "measured": ", ".join(filter(None, [*measured, gain_told(record)])),
        "chosen": "; ".join(filter(None, [record.reason, confidence(record)])),
        "weight of the step": weighing(record),
        "candidates": fates(record),
        "slowest rank": slowest_rank([record]).removeprefix("rank "),
        "all with": shared_fields(record),
    }
    return {heading: text for heading, text in told.items() if text}


def step_times(records: Sequence[TuningRecord]) -> tuple[float | None, float | None]:
    """Milliseconds of the step with the first configs, and with the winners; None where a site was
    not timed.

    Of a step tuned online they are the job's own. Of several sites whose replays were timed, the
    differences that their first configs make are added up.
    """
    if records and records[0].step_ms is not None:
        return records[0].step_ms
    known_ms = [ms for each in records if (ms := _timed_step_ms(each.best)) is not None]
    if not records or len(known_ms) < len(records):
        return None, None
    # In the race others ran beside it.
    best_ms = max(min(known_ms), *(each.best.latency_ms or 0.0 for each in records))
    losses_ms = [ms for each in records if (ms := _loss_ms(each)) is not None]
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


def short_config(each: CandidateRecord) -> str:
    """A config without its hook, whose name says nothing of its speed."""
    return _HOOK.sub("", each.config)


def differing(candidates: Sequence[CandidateRecord]) -> list[str]:
    """Names of the fields in which candidates differ, hooks left out; empty where the fields of one
    are not known.
    """
    if not all(each.fields for each in candidates):
        return []
    names = dict.fromkeys(
        name for each in candidates for name in each.fields if not name.endswith("pre_hook")
    )
    return [name for name in names if len({str(each.fields.get(name)) for each in candidates}) > 1]


def shared_fields(record: TuningRecord) -> str:
    """The fields of the winner that are the same for all candidates: "BLOCK_M=128 num_warps=8";
    hooks left out.
    """
    names = differing(record.candidates)
    shared = {
        name: value for name, value in record.best.fields.items() if names and name not in names
    }
    return " ".join(
        f"{name}={value}" for name, value in shared.items() if not name.endswith("pre_hook")
    )


def candidate_rows(record: TuningRecord, *, has_ranks: bool = False) -> list[dict[str, Any]]:
    """The table of a site, for log, page and ``dist-tune show``: heading -> value, the fastest
    candidate first, each with its reason.

    ``has_ranks``: with the time on each rank.
    """
    names, best_ms = differing(record.candidates), record.best.latency_ms
    ranks = (
        sorted({rank for each in record.candidates for rank in each.rank_latencies_ms})
        if has_ranks
        else []
    )
    return [
        {
            "#": each.index,
            "ms": each.latency_ms,
            "x winner": f"{each.latency_ms / best_ms:.2f}" if each.latency_ms and best_ms else None,
            "+/- ms": each.known_spread_ms,
            "step ms": each.closure_ms,
            "timed": each.n_replays or None,
            **(
                {f"rank {rank}": each.rank_latencies_ms.get(rank) for rank in ranks}
                if len(ranks) > 1
                else {}
            ),
            "registers": each.n_regs,
            "spills": each.n_spills,
            "shared KiB": (
                f"{each.shared_bytes / 1024:.4g}" if each.shared_bytes is not None else None
            ),
            **(
                {name: str(each.fields.get(name, "")) for name in names}
                if 0 < len(names) <= 12
                else {"config": short_config(each)}
            ),
            "why": f"{'dropped: ' if each.failure is not None else ''}{why_not(each, record)}",
        }
        for each in sorted(
            record.candidates,
            key=lambda one: (one.failure is not None, one.latency_ms or float("inf"), one.index),
        )
    ]
