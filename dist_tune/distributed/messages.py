"""What ranks post on the store, and how it comes back: checked, because another program, or another version, may write there.

Knows the forms of parts and verdicts, and nothing of what they decide. A message that does not fit is a ``PeerFailedError`` that names its
rank and its first mistake. A part and a verdict are a line of JSON, and after it the text that they carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from dist_tune.errors import DistTuneError, PeerFailedError
from dist_tune.output import first_mistake, printable

MAX_BYTES = 8 * 2**20
"""Of one message: c10d's TCPStore closes the connection of a rank that posts more."""
_HEADER_BYTES = 2**16
"""Room for the line before the text."""
_MAX_SPELLED = 200
"""Characters of a reason in an error."""

Message = TypeVar("Message")
Part = TypeVar("Part")
Result = TypeVar("Result")


class Header(NamedTuple):
    """What a rank says with its part of a meeting. A JSON array."""

    step: str
    """The closure with its options."""
    topic: str
    """Of the meeting; ``FAILED`` with an error, of a rank that comes with one which is only a consequence."""
    runs: list[tuple[int, int]]
    """Number of each of its latest runs, and collectives that it issued there."""
    odd: dict[int, str]
    """Number of a run with another number of collectives than most -> what it ran."""
    n_issued: int
    """Collectives of the group that it has issued so far; see ``Agreed.is_even``."""
    troubles: list[str]
    """Candidates that failed here between two of their collectives."""
    late: tuple[int, str] | None
    """After a failed collective: a rank that was late for it, and where it was."""


class Agreed(BaseModel):
    """All ranks have come, and take the result that follows the line."""

    state: Literal["agreed"] = "agreed"
    is_even: bool = True
    """False if ranks have issued different numbers of collectives up to the same point: gloo counts what two ranks send each other, too."""


class Mismatch(BaseModel):
    """All ranks have come, to different meetings or with failed collectives; or some wait in different calls for each other."""

    state: Literal["mismatch"] = "mismatch"
    steps: dict[int, tuple[str, str]]
    """Rank -> closure with its options, and topic."""
    doing: dict[int, str] = {}
    """Rank -> what it last did."""
    cause: tuple[int, str] | None = None
    """The rank that left others in a collective, and how."""


class Alone(BaseModel):
    """Ranks have passed the call, or go on without it."""

    state: Literal["alone"] = "alone"
    passed: list[int]
    where: str = ""
    """Where those are that have not passed it, for people."""
    is_even: bool = True
    """As of ``Agreed``: False if ranks are in this call under other numbers of collectives."""


class TimedOut(BaseModel):
    """Ranks did not come."""

    state: Literal["timed out"] = "timed out"
    missing: dict[int, str]
    """Rank -> what it last did."""
    others: dict[int, str] = {}
    topic: str
    by: int
    within_s: float = Field(ge=0, allow_inf_nan=False)


class Aborted(BaseModel):
    """A rank has ended the call with an exception."""

    state: Literal["aborted"] = "aborted"
    rank: int
    kind: str
    error: str
    """The exception on one line or more."""
    message: str
    n_issued: int = 0
    """Collectives of the group that the rank had issued by then."""


Verdict = Agreed | Mismatch | Alone | TimedOut | Aborted

_HEADER: TypeAdapter[Header] = TypeAdapter(Header)
_VERDICT: TypeAdapter[Verdict] = TypeAdapter(Annotated[Verdict, Field(discriminator="state")])


def part_text(header: Header, part: str) -> str:
    """A rank's part of a meeting, for the store."""
    return f"{_HEADER.dump_json(header).decode()}\n{part}"


def read_part(content: bytes, rank: int) -> tuple[Header, bytes]:
    """A rank's part of a meeting. Raises ``PeerFailedError`` for what is none."""
    line, _, part = content.partition(b"\n")
    header = read_message(_HEADER, line, rank, "its part of a meeting")
    return header._replace(step=printable(header.step), topic=printable(header.topic), troubles=[*map(printable, header.troubles)]), part


def verdict_text(verdict: Verdict, result: str = "") -> str:
    """A verdict, for the store. ``result``: of one that is agreed."""
    return f"{verdict.model_dump_json()}\n{result}"


def read_verdict(content: bytes, reader: int) -> tuple[Verdict, bytes]:
    """The verdict of a meeting, and its result. Raises ``PeerFailedError`` for what is none; says which rank has read it."""
    line, _, result = content.partition(b"\n")
    return read_message(_VERDICT, line, -1, f"the verdict of a meeting, as rank {reader} reads it,"), result


def read_message(kind: TypeAdapter[Message], content: bytes, rank: int, what: str) -> Message:
    """A message of a rank, -1 if any may have posted it.

    Raises:
        PeerFailedError: it is too large, or not of this kind; with the first mistake in it.
    """
    try:
        if len(content) <= MAX_BYTES:
            return kind.validate_json(content)
        reason = f"it takes {len(content)} bytes, more than {MAX_BYTES}"
    except ValidationError as error:
        reason = printable(first_mistake(error))[:_MAX_SPELLED]
    whose = f"rank {rank} posted what cannot be read: " if rank >= 0 else ""
    raise PeerFailedError(
        f"{whose}{what} on the c10d store is not of this dist_tune's form ({reason}). Do all ranks run one version, and does no other "
        f"program write to this store?",
        rank,
        reason,
    )


class Reduction(Generic[Part, Result]):
    """A pure function of rank -> part. The last rank to come computes it for all, so equal parts must give equal results."""

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
        """A rank's part as JSON. Raises ``DistTuneError`` for one that does not fit into a message."""
        return _checked(self._part.dump_json(part), "this rank's part of a meeting")

    def of_texts(self, texts: Mapping[int, bytes]) -> str:
        """The result as JSON, from all parts as JSON. Raises ``PeerFailedError`` for a part that is none."""
        parts = {rank: read_message(self._part, text, rank, "its part of a meeting") for rank, text in texts.items()}
        return _checked(self._result.dump_json(self(parts)), "the result of a meeting")

    def load(self, text: bytes) -> Result:
        """The result from its JSON. Raises ``PeerFailedError`` for text that is none."""
        return read_message(self._result, text, -1, "the result of a meeting")


def _checked(text: bytes, what: str) -> str:
    if len(text) > MAX_BYTES - _HEADER_BYTES:
        raise DistTuneError(
            f"{what} takes {len(text)} bytes, and a message on the c10d store at most {MAX_BYTES - _HEADER_BYTES}: tune with fewer "
            f"candidates"
        )
    return text.decode()
