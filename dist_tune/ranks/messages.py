"""What ranks post on the store, and how it comes back: checked, because another program, or another
version, may write there.

Knows the forms of parts and verdicts, and the errors that verdicts mean; nothing of stores. A part
and a verdict are a line of JSON, and after it the text that they carry. One that does not fit is a
``PeerFailedError`` that names its rank and its first mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, get_args, get_type_hints

import torch.distributed as dist
from pydantic import BaseModel, TypeAdapter, ValidationError

from dist_tune.errors import (
    SHARED_ERRORS,
    AbsentRanksError,
    AloneError,
    DistTuneError,
    PeerFailedError,
    StuckConfigError,
)
from dist_tune.log import first_mistake, printable
from dist_tune.ranks.calls import ENDED, Place

MAX_BYTES = 8 * 2**20
"""Of one message: c10d's TCPStore closes the connection of a rank that posts more."""
_HEADER_BYTES = 2**16
"""Room for the line before the text."""
_MAX_REASON, _MAX_TEXT = 200, 100_000
"""Characters of a reason in an error, and of an error's message that peers are told."""
FAILED = "failed: "
"""Prefix of the topic of a rank that comes to a meeting with an error which is only a consequence.
"""
_CLOSED = "caused pair closure"
"""In gloo's error where an earlier collective has failed."""
# Errors of a collective whose peer did not come, or is gone: a consequence, not a cause.
_SECONDARY = re.compile(
    rf"/gloo/|{_CLOSED}|NCCL error|communicator was aborted|\bnccl\w+Error\b|watchdog|connection"
    r" (was )?(closed|reset) by peer \[",
    re.IGNORECASE,
)

MISSED_ADVICE = (
    "Do all ranks call the same collectives in the same order in every replay, and does group="
    " (autotune_pg= of a function) hold all ranks that they touch? Leave out a config that is too"
    " slow on one rank, or raise DIST_TUNE_DEADLINE_S, which collectives wait for while ranks tune."
)
"""What to do where a collective of the closure did not find its ranks."""

Message = TypeVar("Message")
Part = TypeVar("Part")
Result = TypeVar("Result")


class Header(NamedTuple):
    """What a rank says with its part of a meeting. A JSON array."""

    step: str
    """The closure with its options."""
    topic: str
    """Of the meeting; ``FAILED`` with an error, of a rank that comes with one which is only a
    consequence.
    """
    last: str
    """What its latest run of the closure ran, since when, and the candidate that failed here
    between two of its collectives.
    """
    warned: list[str] = []  # noqa: RUF012  # none is changed
    """Topics that this rank has warned of, or holds the warning of."""


class Verdict(BaseModel):
    """What a meeting has come to, for all ranks.

    The result follows the line of one that is agreed; any other is the end of the call.
    """

    kind: str = ""
    """Class of the error that ranks raise which read this; empty: agreed."""
    ranks: list[int] = []
    """The rank that failed; those that did not come; those that have passed the call, or go on
    without it.
    """
    text: str = ""
    """What has happened, for people."""
    error: str = ""
    """Of the rank that failed."""
    warned: dict[str, int] = {}
    """Topics of warnings, with the first rank that has it, which is the one that tells it."""
    n_issued: int = -1
    """Collectives of the group that the rank which ends the call by an error had issued by then."""


HEADER: TypeAdapter[Header] = TypeAdapter(Header)
VERDICT: TypeAdapter[Verdict] = TypeAdapter(Verdict)


def spell(kind: TypeAdapter[Message], message: Message, text: str = "") -> str:
    """A message and the text that it carries, for the store."""
    return f"{kind.dump_json(message, exclude_defaults=True).decode()}\n{text}"


def read(kind: TypeAdapter[Message], content: bytes, rank: int, what: str) -> tuple[Message, bytes]:
    """A message of a rank, -1 if any may have posted it, and the text after its line.

    Raises ``PeerFailedError`` for what is none.
    """
    line, _, text = content.partition(b"\n")
    try:
        return kind.validate_json(line), text
    except ValidationError as error:
        reason = printable(first_mistake(error))[:_MAX_REASON]
    whose = f"rank {rank} posted what cannot be read: " if rank >= 0 else ""
    raise PeerFailedError(
        f"{whose}{what} on the c10d store is not of this dist_tune's form ({reason}). Do all ranks"
        " run one version, and does no other program write to this store?",
        rank,
        reason,
    )


class Reduction(Generic[Part, Result]):
    """A pure function of rank -> part.

    The last rank to come computes it for all, so equal parts must give equal results.
    """

    def __init__(self, function: Callable[[Mapping[int, Part]], Result]) -> None:
        hints = get_type_hints(function)
        self._function = function
        self._result: TypeAdapter[Result] = TypeAdapter(hints.pop("return"))
        (parts,) = hints.values()
        self._part: TypeAdapter[Part] = TypeAdapter(get_args(parts)[1])

    def __call__(self, parts: Mapping[int, Part]) -> Result:
        """The result for these parts, as a plain call."""
        return self._function(parts)

    def dump(self, part: Part) -> str:
        """A rank's part as JSON.

        Raises ``DistTuneError`` for one that does not fit into a message.
        """
        return _checked(self._part.dump_json(part), "this rank's part of a meeting")

    def of_texts(self, texts: Mapping[int, bytes]) -> str:
        """The result as JSON, from all parts as JSON.

        Raises ``PeerFailedError`` for a part that is none.
        """
        parts = {
            rank: read(self._part, text, rank, "its part of a meeting")[0]
            for rank, text in texts.items()
        }
        return _checked(self._result.dump_json(self(parts)), "the result of a meeting")

    def load(self, text: bytes) -> Result:
        """The result from its JSON. Raises ``PeerFailedError`` for text that is none."""
        return read(self._result, text, -1, "the result of a meeting")[0]


def _checked(text: bytes, what: str) -> str:
    if len(text) > MAX_BYTES - _HEADER_BYTES:
        most = MAX_BYTES - _HEADER_BYTES
        raise DistTuneError(
            f"{what} takes {len(text)} bytes, and a message on the c10d store at most {most}: tune"
            " with fewer candidates"
        )
    return text.decode()


@Reduction
def all_came(parts: Mapping[int, None]) -> None:
    """Nothing but that all ranks have come."""


def tellers(headers: Mapping[int, Header]) -> dict[str, int]:
    """Topics of warnings, each with the first rank that has it."""
    return {topic: rank for rank in sorted(headers, reverse=True) for topic in headers[rank].warned}


# -- errors ----------------------------------------------------------------------------------------


def is_secondary(error: BaseException) -> bool:
    """True for a collective that failed because a peer did: such an error is never the root
    cause.
    """
    if isinstance(error, DistTuneError):
        return False  # its text holds names of the user's, such as a kernel's
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(_SECONDARY.search(str(error)))
    )


def text_of(error: BaseException) -> str:
    """An error on one line or more, cut to what a message can hold."""
    return f"{type(error).__name__}: {str(error)[:2000]}"


def aborted(error: BaseException, rank: int, place: Place, n_issued: int) -> Verdict:
    """A rank ends the call because of its error."""
    kind, text = type(error).__name__, str(error)[:_MAX_TEXT]
    if kind not in SHARED_ERRORS and kind != StuckConfigError.__name__:
        kind = PeerFailedError.__name__
        text = (
            f"rank {rank} raised {text_of(error)} while {place.closure} was being tuned. Process"
            " groups whose collectives were under way can no longer be used."
        )
    return Verdict(kind=kind, ranks=[rank], text=text, error=text_of(error), n_issued=n_issued)


def timed_out(
    seen: Mapping[int, str], lost: Sequence[int], topic: str, place: Place, when: str
) -> Verdict:
    """Ranks did not come.

    ``seen``: where each missing rank is. ``lost``: those that are waited for no more. ``when``:
    after how long, and who has noticed.
    """
    ranks = sorted(lost)
    order = [*ranks, *(rank for rank in sorted(seen) if rank not in ranks)]
    last = "; ".join(f"rank {rank} last seen at: {seen[rank]}" for rank in order)
    where = (
        "after a failed collective" if topic.startswith(FAILED) else f"to the exchange {topic!r}"
    )
    advice = (
        "Every rank of the group must call the step with the same group= (autotune_pg= of a"
        " function), and a kernel whose key is new on one rank must be launched on all."
        " DIST_TUNE_DEADLINE_S sets the deadline."
    )
    if all(ENDED in seen[rank] for rank in ranks):
        advice = "Its log, or what has started it, says why."
    text = f"{last}. So ranks {ranks} did not come {where} of {place.text} {when}. {advice}"
    return Verdict(kind=AbsentRanksError.__name__, ranks=ranks, text=text)


def mismatched(headers: Mapping[int, Header], place: Place) -> Verdict:
    """All ranks have come, to different meetings or with failed collectives."""
    failed = {
        rank: header.topic.removeprefix(FAILED)
        for rank, header in headers.items()
        if header.topic.startswith(FAILED)
    }
    if not failed:
        first = next(iter(headers))
        other = next(rank for rank in headers if headers[rank][:2] != headers[first][:2])
        steps = [
            f"rank {rank} is in {headers[rank].step}, step {headers[rank].topic!r}"
            for rank in (first, other)
        ]
        return out_of_order(", ".join(steps), [first, other])
    told = []
    for rank, header in headers.items():
        came = "waited in vain" if rank in failed else f"came to {header.topic!r}"
        told.append(f"rank {rank} {came} ({header.last})")
    advice = MISSED_ADVICE
    if any(_CLOSED in text for text in failed.values()):
        advice = (
            "A collective of the group has failed before, and gloo cannot use it again: make the"
            " group anew."
        )
    text = (
        f"A collective of {place.closure}, which was being tuned, did not find all its ranks:"
        f" {'; '.join(told)}. {advice}"
    )
    first, error = next(iter(failed.items()))
    return Verdict(kind=PeerFailedError.__name__, ranks=[first], text=text, error=error)


def alone(why: str, ranks: Sequence[int]) -> Verdict:
    """Ranks have passed the call, or others go on without them."""
    return Verdict(kind=AloneError.__name__, ranks=list(ranks), text=why)


def crossed(places: Mapping[int, Place], *, is_gathering: bool) -> Verdict:
    """Two ranks wait in different calls for each other."""
    where = " and ".join(
        f"rank {rank} waits in {place.text}" for rank, place in sorted(places.items())
    )
    return alone(where, sorted(places)) if is_gathering else out_of_order(where, sorted(places))


def out_of_order(where: str, ranks: Sequence[int]) -> Verdict:
    """Ranks are in different closures, or at different steps of one."""
    text = f"{where}. Call tuned closures in the same order on all ranks of their group."
    return Verdict(kind="RankMismatchError", ranks=list(ranks), text=text)


def error_of(verdict: Verdict, rank: int, place: Place) -> DistTuneError:
    """The error that the end of a call means on a rank, in this call."""
    if verdict.kind in SHARED_ERRORS:  # with a list of configs, one a line
        return SHARED_ERRORS[verdict.kind]("\n".join(map(printable, verdict.text.split("\n"))))
    text, ranks = printable(verdict.text), verdict.ranks
    if verdict.kind == AloneError.__name__:
        return AloneError(
            f"rank {rank} is alone in {place.text}: {text}",
            [each for each in ranks if each != rank],
        )
    if verdict.kind == AbsentRanksError.__name__:
        return AbsentRanksError(f"{text} Rank {rank} stops for that.", tuple(ranks))
    cause, error = ranks[0] if ranks else -1, printable(verdict.error)
    if verdict.kind == StuckConfigError.__name__:
        return StuckConfigError(text, cause, error)
    return PeerFailedError(f"{text} Rank {rank} stops for that.", cause, error)
