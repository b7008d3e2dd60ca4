"""Verdicts that agree on nothing, as errors; and the causes that they name.

Knows the values of a verdict and the texts for people; nothing of stores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch.distributed as dist

from dist_tune.distributed.calls import Place
from dist_tune.distributed.messages import Aborted, Alone, Header, Mismatch, TimedOut
from dist_tune.errors import (
    SHARED_ERRORS,
    AbsentRanksError,
    AloneError,
    DistTuneError,
    PeerFailedError,
    RankMismatchError,
    StuckConfigError,
)
from dist_tune.output import printable

_MAX_MESSAGE = 100_000
"""Characters of an error's message that peers are told: a message on the store has a size limit."""
FAILED = "failed: "
"""Prefix of the topic of a rank that comes to a meeting with an error which is only a consequence."""
# Errors of a collective whose peer did not come, or is gone: a consequence, not a cause.
_SECONDARY = re.compile(
    r"/gloo/|NCCL error|communicator was aborted|\bnccl\w+Error\b|watchdog|connection (was )?(closed|reset) by peer \[", re.IGNORECASE
)


def is_secondary(error: BaseException) -> bool:
    """True for a collective that failed because a peer did: such an error is never the root cause."""
    if isinstance(error, DistTuneError):
        return False  # its text holds names of the user's, such as a kernel's
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_SECONDARY.search(str(error))))


def text_of(error: BaseException) -> str:
    """An error on one line or more, cut to what a message can hold."""
    return f"{type(error).__name__}: {str(error)[:2000]}"


def end_by(rank: int, error: BaseException, n_issued: int = 0) -> Aborted:
    """The verdict by which a rank ends the call because of its error."""
    kind, message = type(error).__name__, str(error)[:_MAX_MESSAGE]
    return Aborted(rank=rank, kind=kind, error=text_of(error), message=message, n_issued=n_issued)


def cause_of(headers: Mapping[int, Header]) -> tuple[int, str] | None:
    """The rank that left others in a collective, and how: what failed there, a run with fewer collectives than elsewhere, or lateness."""
    for rank, header in headers.items():
        if header.troubles:
            return rank, f"left {header.troubles[0]}, between two of its collectives"
    counts: dict[int, dict[int, int]] = {}
    for rank, header in headers.items():
        for number, count in header.runs:
            counts.setdefault(number, {})[rank] = count
    usual = Counter(count for each in counts.values() for count in each.values()).most_common(1)
    for number, by_rank in sorted(counts.items()):
        expected = max([*by_rank.values(), usual[0][0]])
        rank = min(by_rank, key=by_rank.__getitem__)
        if by_rank[rank] < expected and (len(set(by_rank.values())) > 1 or len(by_rank) < len(headers)):
            what = next((header.odd[number] for header in headers.values() if number in header.odd), f"run {number}")
            return rank, f"issued {by_rank[rank]} collectives where {expected} are usual, in {what}"
    return next((header.late for header in headers.values() if header.late is not None), None)


def error_of(verdict: Mismatch | Alone | TimedOut | Aborted, rank: int, place: Place) -> DistTuneError:
    """The error that a verdict means on a rank, in this call."""
    if isinstance(verdict, Alone):
        others = [each for each in verdict.passed if each != rank]
        why = f"ranks {others} have passed it, or go on without it" if others else "other ranks have not come to it"
        why = printable(verdict.where) or why
        return AloneError(f"rank {rank} is alone in {place.text}: {why}", others)
    if isinstance(verdict, TimedOut):
        return _absent(verdict, rank, place)
    if isinstance(verdict, Mismatch):
        return _mismatch(verdict, place.closure)
    if verdict.kind == StuckConfigError.__name__:
        return StuckConfigError(printable(verdict.message), verdict.rank, printable(verdict.error))
    if verdict.kind in SHARED_ERRORS:
        return SHARED_ERRORS[verdict.kind]("\n".join(map(printable, verdict.message.split("\n"))))  # it may list configs
    error = printable(verdict.error)
    return PeerFailedError(
        f"rank {verdict.rank} raised {error} while {place.closure} was being tuned; rank {rank} stops for that. "
        f"Process groups whose collectives were under way can no longer be used.",
        verdict.rank,
        error,
    )


def _absent(verdict: TimedOut, rank: int, place: Place) -> AbsentRanksError:
    last = [f"rank {each} last seen at: {printable(doing)}" for each, doing in sorted(verdict.missing.items())]
    others = [f"rank {each} at: {printable(doing)}" for each, doing in sorted(verdict.others.items())]
    is_broken = verdict.topic.startswith(FAILED)
    topic = "after a collective had failed there" if is_broken else f"to the meeting for {printable(verdict.topic)!r}"
    failure = f" That collective's error: {printable(verdict.topic.removeprefix(FAILED))}." if is_broken else ""
    return AbsentRanksError(
        f"{'; '.join([*last, *others])}. So ranks {sorted(verdict.missing)} did not come {topic} of {place.text} within "
        f"{verdict.within_s:g} s (noticed by rank {verdict.by}, read by rank {rank}).{failure} Every rank of the group must call the "
        f"closure, and a kernel whose key is new on one rank must be launched on all. DIST_TUNE_DEADLINE_S sets the deadline.",
        tuple(sorted(verdict.missing)),
    )


def _mismatch(verdict: Mismatch, closure: str) -> DistTuneError:
    steps = {rank: (printable(step), printable(topic)) for rank, (step, topic) in sorted(verdict.steps.items())}
    failed = {rank: topic.removeprefix(FAILED) for rank, (_, topic) in steps.items() if topic.startswith(FAILED)}
    if failed:
        waiting, error = next(iter(failed.items()))
        rank, why = verdict.cause or (waiting, "")
        told = f"rank {rank} {printable(why)}; so " if verdict.cause else ""
        others = [
            f"rank {each} at {topic!r} (last seen at: {printable(verdict.doing.get(each, ''))})"
            for each, (_, topic) in steps.items()
            if each not in failed
        ]
        return PeerFailedError(
            f"{told}rank {waiting} left {closure} with {error} while it was being tuned; ranks {list(failed)} failed so, "
            f"{', '.join(others) or 'no other'} did not. A collective of the closure did not find all its ranks in time: does every rank "
            f"call the same collectives in the same order in every replay, and does group= hold all ranks that they touch? Or is a "
            f"config slow on one rank only?",
            rank,
            why or error,
        )
    first, *rest = (f"rank {rank} is in {step}, step {topic!r}" for rank, (step, topic) in steps.items())
    other = next((text for text in rest if text.partition(" is in ")[2] != first.partition(" is in ")[2]), "")
    return RankMismatchError(f"{first}, {other}. Call tuned closures in the same order on all ranks of their group.")
