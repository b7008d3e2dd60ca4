"""What ranks post on the store, as it comes back: checked, because another program, or another version, may write there.

Knows the forms of parts, verdicts and counts; nothing of what they decide. Each message that does not fit is a ``PeerFailedError`` that
names its rank and its first mistake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from dist_tune.distributed.protocol.calls import Place
from dist_tune.errors import DistTuneError, PeerFailedError
from dist_tune.output import first_mistake, printable

MAX_BYTES = 8 * 2**20
"""Of one message: c10d's TCPStore closes the connection of a rank that posts more."""
_MAX_SPELLED = 200
"""Characters of a reason in an error."""
_MAX_DIGITS = 9
_COUNT = re.compile(rb"-?[0-9]{1,18}")
_Message = TypeVar("_Message")


class StoredPart(NamedTuple):
    """A rank's part of a meeting. A JSON array."""

    closure: str
    topic: str
    part: str
    place: Place
    passed: dict[str, list[int]] | None


class _Stored(BaseModel):
    model_config = ConfigDict(extra="allow")

    place: Place
    """Of the rank that has fixed the verdict."""


class _Agreed(_Stored):
    state: Literal["agreed"]
    result: str | None = None
    steps: list[tuple[str, str]] | None = None
    number: int | None = None
    """Of the call, where it has several on these ranks: all count on from the highest."""

    @model_validator(mode="after")
    def _has_an_outcome(self) -> Self:
        if self.result is None and self.steps is None:
            raise ValueError("neither a result nor steps")
        return self


class _Apart(_Stored):
    state: Literal["apart"]
    passed: dict[int, dict[str, list[int]]]
    raised: str = ""
    """What raised on ranks in earlier calls, which is why they may count calls otherwise."""
    is_crossed: bool = False
    """True if ranks wait in calls of different closures that none of them has passed: all go on alone."""


class _Aborted(_Stored):
    state: Literal["aborted"]
    rank: int
    kind: str
    error: str
    message: str


class _TimedOut(_Stored):
    state: Literal["timed out"]
    missing: dict[int, str]
    topic: str
    closure: str
    by: int
    within_s: float = Field(ge=0, allow_inf_nan=False)


_PART: TypeAdapter[StoredPart] = TypeAdapter(StoredPart)
_VERDICT: TypeAdapter[_Agreed | _Apart | _Aborted | _TimedOut] = TypeAdapter(
    Annotated[_Agreed | _Apart | _Aborted | _TimedOut, Field(discriminator="state")]
)


def read_part(content: bytes, rank: int) -> StoredPart:
    """A rank's part of a meeting.

    Raises:
        PeerFailedError: it is none; names the rank.
    """
    return read_message(_PART, content, rank, "its part of a meeting")


def read_verdict(content: bytes, reader: int) -> dict[str, Any]:
    """The verdict of a meeting, with steps and signs of progress on one line each.

    Raises:
        PeerFailedError: it is none. Says which rank has read it, because any may have written it.
    """
    verdict = read_message(_VERDICT, content, -1, f"the verdict of a meeting, as rank {reader} reads it,").model_dump(exclude_unset=True)
    if verdict.get("steps"):
        verdict["steps"] = [[printable(closure), printable(topic)] for closure, topic in verdict["steps"]]
    verdict["place"] = Place(*verdict["place"])
    if verdict.get("raised"):
        verdict["raised"] = printable(verdict["raised"])
    if "missing" in verdict:
        verdict["missing"] = {rank: printable(last) for rank, last in verdict["missing"].items()}
    return verdict


def read_message(kind: TypeAdapter[_Message], content: bytes, rank: int, what: str) -> _Message:
    """A message of a rank, -1 if any may have posted it.

    Raises:
        PeerFailedError: it is too large, or not of this kind; with the first mistake in it.
    """
    try:
        if len(content) > MAX_BYTES:
            raise _unreadable(rank, what, f"it takes {len(content)} bytes, more than {MAX_BYTES}")
        return kind.validate_json(content)
    except ValidationError as error:
        raise _unreadable(rank, what, first_mistake(error)) from None


def read_text(content: bytes, what: str) -> str:
    """A text that any rank may have posted.

    Raises:
        PeerFailedError: it is too large, or no text.
    """
    if len(content) > MAX_BYTES:
        raise _unreadable(-1, what, f"it takes {len(content)} bytes, more than {MAX_BYTES}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(-1, what, str(error)) from None


def read_by(content: bytes, members: Sequence[int], what: str) -> tuple[int, str]:
    """A rank, and the text that it posted after its number and a space.

    Raises:
        PeerFailedError: it is too large, no text, or of no rank among the members.
    """
    number, _, text = read_text(content, what).partition(" ")
    if not number.isascii() or not number.isdecimal() or len(number) > _MAX_DIGITS or int(number) not in members:
        raise _unreadable(-1, what, f"{number[:80]!r} is no rank")
    return int(number), text


def check_size(text: str, what: str) -> str:
    """The text, if it fits into one message.

    Raises:
        DistTuneError: it does not.
    """
    # Inside a message it is a JSON string, of at most twice the size if it is JSON itself.
    if len(text) > MAX_BYTES // 4 and (n_bytes := len(json.dumps(text)) + 2**16) > MAX_BYTES:
        raise DistTuneError(
            f"{what} takes {n_bytes} bytes, and a message on the c10d store at most {MAX_BYTES}: tune with fewer candidates"
        )
    return text


def count_up(store: dist.Store, key: str, amount: int = 1) -> int:
    """Add to a count on the store.

    Raises:
        PeerFailedError: the key holds no number, with which the process that hosts the store would end.
    """
    count = store.compare_set(key, "", "0")
    if _COUNT.fullmatch(count) is None:
        raise _unreadable(-1, f"the count {key!r}", f"{count[:80]!r} is no number")
    return store.add(key, amount)


def _unreadable(rank: int, what: str, reason: str) -> PeerFailedError:
    text = printable(reason)[:_MAX_SPELLED]
    whose = f"rank {rank} posted what cannot be read: " if rank >= 0 else ""
    return PeerFailedError(
        f"{whose}{what} on the c10d store is not of this dist_tune's form ({text}). Do all ranks run one version, and does no other "
        f"program write to this store?",
        rank,
        text,
    )
