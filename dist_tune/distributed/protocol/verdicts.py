"""Verdicts of meetings that agree on nothing, as errors.

Knows the values of a verdict and the texts for people; nothing of stores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dist_tune.errors import SHARED_ERRORS, AbsentRanksError, DistTuneError, PeerFailedError, RankMismatchError, StuckConfigError
from dist_tune.output import printable

_MAX_MESSAGE = 100_000
"""Characters of an error's message that peers are told: a message on the store has a size limit."""

Verdict = dict[str, Any]
"""JSON; ``state`` says which: "agreed", "aborted", "timed out" or "apart"."""

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


def mismatch_of(
    members: Sequence[int],
    steps: Sequence[Sequence[str]],
    closure: str,
    doing: Mapping[int, str],
    cause: Sequence[Any] | None = None,
) -> DistTuneError:
    """The error of a meeting to which ranks came with different (closure, topic). ``doing``: rank -> its last sign of progress.

    ``cause``: the rank that left others in a collective, and how, if that is known.
    """
    by_rank = dict(zip(members, steps, strict=True))
    failed = {rank: topic.removeprefix(FAILED) for rank, (_, topic) in by_rank.items() if topic.startswith(FAILED)}
    if failed:
        waiting, error = next(iter(failed.items()))
        rank, why = cause or (waiting, "")
        told = f"rank {rank} {why}; so " if cause else ""
        others = [f"rank {each} at {topic!r} (last seen at: {doing[each]})" for each, (_, topic) in by_rank.items() if each not in failed]
        return PeerFailedError(
            f"{told}rank {waiting} left {closure} with {error} while it was being tuned; ranks {list(failed)} failed so, "
            f"{', '.join(others) or 'no other'} did not. A collective of the closure did not find all its ranks in time: does every rank "
            f"call the same collectives in the same order in every replay, or is a config slow on one rank only?",
            rank,
            why or error,
        )
    first, *rest = (f"rank {rank} is in {closure}, step {topic!r}" for rank, (closure, topic) in by_rank.items())
    other = next(text for text in rest if text.partition(" is in ")[2] != first.partition(" is in ")[2])
    return RankMismatchError(f"{first}, {other}. Call tuned closures in the same order on all ranks of their group.")


def end_by(rank: int, error: BaseException) -> Verdict:
    """The verdict by which a rank ends the tuning because of its error."""
    message = str(error)[:_MAX_MESSAGE]
    return {"state": "aborted", "rank": rank, "kind": type(error).__name__, "error": text_of(error), "message": message}


def error_of(verdict: Verdict, rank: int, closure: str) -> DistTuneError:
    """The error that a verdict "aborted" or "timed out" means on a rank."""
    if verdict["state"] == "timed out":
        missing = {int(rank): last for rank, last in verdict["missing"].items()}
        others = [f"rank {other} at: {each}" for other, each in verdict.get("others", {}).items()]
        last = "; ".join([*(f"rank {rank} last seen at: {each}" for rank, each in missing.items()), *others])
        return AbsentRanksError(
            f"ranks {sorted(missing)} did not come to the meeting for {verdict['topic']!r} of {verdict['closure']} within "
            f"{verdict['within_s']:g} s (noticed by rank {verdict['by']}, read by rank {rank}); {last}. Every rank of the group must "
            f"call the closure, and a kernel whose key is new on one rank must be launched on all. "
            f"DIST_TUNE_DEADLINE_S sets the deadline.",
            tuple(sorted(missing)),
        )
    if verdict["kind"] == StuckConfigError.__name__:
        return StuckConfigError(printable(verdict["message"]), verdict["rank"], printable(verdict["error"]))
    if verdict["kind"] in SHARED_ERRORS:
        return SHARED_ERRORS[verdict["kind"]]("\n".join(map(printable, verdict["message"].split("\n"))))  # it may list configs
    error = printable(verdict["error"])
    return PeerFailedError(
        f"rank {verdict['rank']} raised {error} while {closure} was being tuned; rank {rank} stops for that. "
        f"Process groups whose collectives were under way can no longer be used.",
        verdict["rank"],
        error,
    )
