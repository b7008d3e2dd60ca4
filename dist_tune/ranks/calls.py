"""Calls of closures, counted on each rank, and what follows for a meeting from what missing ranks
say of themselves. Pure.

Ranks make the same calls of a closure in the same order, but meet only in those that are new to
some rank. A rank that waits in its third call must not replay it with a rank that has come to its
fourth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dist_tune.log import closure_name, plain

State = Literal["", "gone", "runs", "stopped"]
"""Of a process, as others of its host see it; empty on another host, or in another namespace."""
ENDED = "its process has ended"
_STATES = {"gone": ENDED, "stopped": "its process is stopped"}


class Place(NamedTuple):
    """A call that may end in a meeting, on one rank. A JSON array."""

    closure: str
    number: int
    """Of the call, among those of this closure that this rank has made."""
    before: int = 0
    """Collectives that this rank had issued on the group before the call."""

    @property
    def text(self) -> str:
        """The call, for people."""
        return f"{self.closure}, call {self.number}"


@dataclass(slots=True, eq=False)
class Calls:
    """The calls of one closure on this rank."""

    n_calls: int = 0
    """Those that are over, or that may end in a meeting."""


class Call(NamedTuple):
    """A call as it comes to its meetings. A JSON array."""

    place: Place
    has_talked: bool
    """True if its first run has issued collectives of the group: no rank has come to the end of
    that run without the others.
    """
    n_issued: int
    """Collectives of the group that this rank has issued so far."""

    @property
    def key(self) -> str:
        """Its part of the store, the same on all ranks: by collectives where these show the call,
        by its number elsewhere.
        """
        if self.has_talked:
            return f"{self.place.closure}/c{self.place.before}"
        return f"{self.place.closure}/n{self.place.number}"

    def holds(self, *others: Place) -> bool:
        """True if a rank that is at one of ``others`` is in this very call."""
        return any(Call(other, self.has_talked, 0).key == self.key for other in others)


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank says of itself when a peer asks, a JSON object; and what that peer sees of it
    besides. Empty: it has said nothing.
    """

    question: int = -1
    """Number of the question that it will answer next; -1 before its first call that might end in a
    meeting.
    """
    process: str = ""
    """See ``process_name``."""
    n_issued: int = 0
    """Collectives that it has issued on the group."""
    n_of_process: int = 0
    """Collectives that it has issued on all groups."""
    n_calls: dict[str, int] = field(default_factory=dict)
    """Closure -> its calls so far, see ``Calls``."""
    inside: list[Place] = field(default_factory=list)
    """Its calls under way that may end in a meeting."""
    waits: Call | None = None
    """The call whose first meeting it waits in."""
    doing: str = ""
    for_s: float = 0.0
    """Seconds that it has done that."""
    may_last: bool = False
    """True in what may take any time: its first run, compilation, loading."""
    first_run_s: float = 0.0
    """Seconds of the first run of its call: a replay may take twice as long."""
    is_over: bool = False
    """True at the end of its program."""

    # Seen by the rank that asks:
    beat: str = ""
    """What it began that might hold its interpreter for ever, so that it answers no more."""
    silent_s: float = 0.0
    """Seconds since a question that it has not answered yet."""
    state: State = ""
    """Of its process."""
    is_fresh: bool = False
    """True if the answer was given after the first question to it."""

    @property
    def text(self) -> str:
        """Where it is, since when, and how its process does, for people."""
        if self.question < 0:
            return "no call with this group yet"
        where = f" of {self.inside[-1].text}" if self.inside else ""
        doing = f"{self.doing}{where} for {self.for_s:.1f} s" if self.doing else "no tuned call"
        state = _STATES.get(self.state, "")
        last = f" after {self.beat}" if self.beat and self.beat not in doing else ""
        silence = f"no sign of life for {self.silent_s:.1f} s{last}" if self.silent_s >= 1.0 else ""
        return ", ".join(filter(None, [doing, state, silence]))

    def late_text(self, rank: int, place: Place, waited_s: float, *, is_here: bool) -> str:
        """For the terminal of a rank that waits in ``place`` for this one, which ``is_here`` or has
        yet to come.
        """
        where, doing = (
            f"call {place.number} of {closure_name(place.closure)}, {waited_s:.0f} s",
            self.doing if is_here else "",
        )
        if not is_here and self.inside:
            doing = (
                f"it is in call {self.inside[-1].number} of {closure_name(self.inside[-1].closure)}"
            )
        what = "is late in" if is_here else "has not come to"
        told = f"rank {rank} {what} {where}"
        why = _STATES.get(self.state, "") or doing
        return f"{told}: {plain(why)}" if why else told


def has_passed(call: Call, card: Card) -> bool:
    """True if a rank will not come to a meeting about this call.

    A collective takes all ranks: one that has issued more has gone on.
    """
    has_gone_on = card.n_issued > call.n_issued
    # In a call without collectives, its number may be another's.
    if call.holds(*card.inside) and (call.has_talked or not has_gone_on):
        return False
    return has_gone_on or card.n_calls.get(call.place.closure, 0) >= call.place.number


Outcome = Literal["", "alone", "timed out", "crossed"]
"""Of a wait. Empty: go on waiting; crossed: another rank waits in another call for this one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank waits in a meeting, in seconds."""

    deadline_s: float
    gather_s: float
    """For a rank that lives and has not come to the call."""
    is_first: bool = False
    """True in the first meeting of a call."""
    is_gathering: bool = False
    """True in a meeting of a call that other ranks may have passed."""
    is_optional: bool = False
    """True if this rank has nothing to tune, and comes to see whether others have."""
    is_broken: bool = False
    """True after a collective has failed: ranks that are stopped are not waited for."""

    def outcome(
        self, call: Call, mine: Card, missing: Mapping[int, Card], waited_s: float
    ) -> tuple[Outcome, list[int]]:
        """What the wait of a rank for ``missing`` ones has come to, and which ranks decided that.

        ``mine``: this rank's own card. ``waited_s``: seconds since one of them was last seen in
        this call.
        """
        passed = [rank for rank, card in missing.items() if has_passed(call, card)]
        if self.is_gathering and passed:
            return "alone", passed
        here = {rank for rank, card in missing.items() if call.holds(*card.inside)}
        died = {rank for rank, card in missing.items() if card.state == "gone" and not card.is_over}
        # Those in no call so far have had no part in what failed.
        if self.is_broken and mine.for_s >= min(1.0, self.deadline_s):
            died |= {rank for rank, card in missing.items() if card.question < 0}
        lost = [
            r
            for r, card in missing.items()
            if r in died or card.is_over or self._is_stuck(card, is_here=r in here)
        ]
        if lost:
            # Those that fell silent with them, as all ranks of a host do, may have answered a
            # moment longer.
            silent_s = max(1.0, 0.8 * max(missing[rank].silent_s for rank in lost))
            lost = [
                rank for rank, card in missing.items() if rank in lost or card.silent_s >= silent_s
            ]
            # A rank that has ended elsewhere: the call needs no meeting, and the step itself says
            # whether it needs that rank.
            return ("alone" if self.is_gathering and not died & here else "timed out"), lost
        for rank, card in missing.items():
            waits = card.waits
            is_elsewhere = (
                waits is not None
                and waits.key != call.key
                and (call.holds(waits.place) or not has_passed(waits, mine))
            )
            if self.is_first and card.is_fresh and is_elsewhere:
                return "crossed", [rank]
        patience_s = self.deadline_s if self.is_optional or not self.is_gathering else self.gather_s
        if waited_s >= patience_s:
            return ("alone" if self.is_optional else "timed out"), list(missing)
        return "", []

    def _is_stuck(self, card: Card, *, is_here: bool) -> bool:
        """True if a rank answers no more, or in a later meeting does one and the same thing for too
        long.
        """
        # A process of this host that is stopped comes to the call that it is in; so does one that
        # is too busy to answer in its first run.
        will_come = card.state == "stopped" or (card.state == "runs" and self.is_gathering)
        if is_here and will_come and not self.is_broken:
            return False
        patience_s = self.deadline_s if self.is_gathering or self.is_broken else 2 * self.deadline_s
        # Its own watchdog ends it before. An answer from before this meeting says only where it
        # was: in one that a late rank held up, too.
        is_slow = (
            card.is_fresh
            and not card.may_last
            and card.for_s >= 2 * (self.deadline_s + card.first_run_s)
        )
        return card.silent_s >= patience_s or (is_here and is_slow and not self.is_gathering)
