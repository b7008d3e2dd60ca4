"""Calls of closures, counted on each rank, by which ranks tell whether they are in the same one. Pure.

Ranks make the same calls of a closure in the same order, but meet only in those that are new to some rank. A rank that waits in its third
call must not replay it with a rank that has come to its fourth. A call that raises on one rank and is made again there counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

Passed = Mapping[int, Mapping[str, list[int]]]
"""Rank -> closure -> number of its calls so far, and numbers of those that are not over; and ``ISSUED`` -> collectives of the group."""
ISSUED = ""
"""In place of a closure: collectives that a rank has issued on the group so far."""
_MAX_RAISED = 300
"""Characters of an error that peers are told with the place of a rank."""


class Place(NamedTuple):
    """The call that a rank waits in. A JSON array."""

    closure: str
    number: int
    issued: int = 0
    """Collectives of the group until the end of the rank's run of this call, or so far."""
    before: int = 0
    """Collectives of the group before that run."""
    raised: str = ""
    """The last call that raised on this rank, with nothing to tune, and its error: the rank may count calls otherwise since."""

    @property
    def has_talked(self) -> bool:
        """True if this call has issued collectives: no rank has come to the end of one without the others."""
        return self.issued > self.before

    @property
    def text(self) -> str:
        """The call, for people and as ranks compare it."""
        return f"{self.closure}, call {self.number}"


@dataclass(slots=True, eq=False)
class Calls:
    """The calls of one closure on this rank."""

    n_calls: int = 0
    """Calls that are over, or that may end in a meeting; the latter are ``under_way`` until they are over."""
    under_way: list[int] = field(default_factory=list)
    known_as: dict[int, int] = field(default_factory=dict)
    """Number of a call under way -> a higher one, by which the ranks that have met in it count on."""
    raised: str = ""
    """See ``Place``."""
    _raised_after: int | None = None
    """Collectives of this process until the last call raised; None if that did not."""

    @contextmanager
    def one(self) -> Iterator[int]:
        """A call that may end in a meeting, with its number. Calls of one name may lie within each other."""
        number = self.n_calls + 1
        self.under_way.append(number)  # first: a peer that asks between these lines would take the call for one that is over
        self.n_calls = number
        try:
            yield number
        finally:
            self.under_way.remove(number)
            if number in self.known_as:
                self.under_way.remove(self.known_as.pop(number))

    def note_raised(self, closure: str, error: BaseException, n_issued: int) -> None:
        """The call that was counted last had nothing to tune, and raised. ``n_issued``: collectives of this process so far.

        It stands as counted unless the next call is the same one, made again: ``go_on``.
        """
        self.raised = f"{type(error).__name__} in {Place(closure, self.n_calls).text}: {error}"[:_MAX_RAISED]
        self._raised_after = n_issued

    def go_on(self, n_issued: int) -> None:
        """Another call begins after one that raised. If no collective has come between, it is that call, and counts once.

        Peers have made one call meanwhile; they have come no further than to the next collective.
        """
        if self._raised_after == n_issued:
            self.n_calls -= 1
        self._raised_after = None

    def count_as(self, number: int, higher: int) -> None:
        """Count on from a higher number after a call under way, because it has that one on another rank."""
        if number in self.under_way and higher > number and number not in self.known_as:
            self.known_as[number] = higher
            self.under_way.append(higher)
            self.n_calls += higher - number  # calls that lie within it count on as well


class CallsByGroup(dict[Hashable, Calls]):
    """The calls of one function, by the group that decides. One that raised costs the next call a look-up, and others nothing."""

    def __init__(self, n_issued: Callable[[], int]) -> None:
        super().__init__()
        self._n_issued = n_issued
        self._raised: dict[Hashable, Calls] = {}
        self._lock = threading.Lock()

    def count_on(self, group: Hashable, calls: Calls) -> None:
        """Count the calls of this group as these, which its ranks know."""
        if group in self._raised:
            self.__missing__(group)
        self[group] = calls

    def note_raised(self, group: Hashable, closure: str, error: BaseException) -> None:
        """See ``Calls.note_raised``."""
        calls = self[group]
        calls.note_raised(closure, error, self._n_issued())
        self._raised[group] = calls
        self.pop(group, None)

    def __missing__(self, group: Hashable) -> Calls:
        with self._lock:
            if (known := self.get(group)) is not None and group not in self._raised:  # another thread has looked meanwhile
                return known
            calls = self._raised.pop(group, None) or Calls()
            calls.go_on(self._n_issued())
            self[group] = calls
            return calls


def ahead(place: Place, passed: Passed, inside: Collection[int] = ()) -> list[int]:
    """Ranks that have passed this call and will not come to a meeting about it. ``inside``: ranks with a call of the closure under way.

    A rank that has issued more collectives has gone on. Where the call holds collectives, a rank that is inside one may be in this call
    under another number: it may have made more calls before.
    """
    found = []
    for rank, calls in passed.items():
        n_calls, *under_way = calls.get(place.closure, [0])
        if calls.get(ISSUED, [0])[0] > place.issued > 0 or (
            n_calls >= place.number and place.number not in under_way and not (place.has_talked and rank in inside)
        ):
            found.append(rank)
    return found


def is_one_call(places: Collection[Place]) -> bool:
    """True if these ranks are in one call: of one number, or after the same collectives, some of them of this call."""
    first, *rest = places
    if all(each.closure == first.closure and each.number == first.number for each in rest):
        return True
    return all(each.closure == first.closure and each.issued == first.issued and each.has_talked for each in places)


def is_inside(place: Place, call: Place) -> bool:
    """True if a rank that is at ``place``, or has ended there, has come to this call: by its number, or by collectives of the call.

    It has issued some of these, or would have issued one of these first.
    """
    if place.closure != call.closure:
        return False
    issued = max(place.issued, place.before + 1)
    return place.number == call.number or (call.has_talked and place.before < call.issued and issued > call.before)


def raised_in(places: Mapping[int, Place]) -> str:
    """What raised on ranks in earlier calls, by which they may count calls otherwise; empty if nothing did."""
    return "; ".join(f"rank {rank} raised {place.raised}" for rank, place in places.items() if place.raised)


def is_apart(places: Mapping[int, Place], passed: Passed) -> bool:
    """True if the ranks are in several calls, and some rank waits in one that another has passed. ``places``: by rank."""
    return not is_one_call(list(places.values())) and any(ahead(place, passed) for place in places.values())


_registered: dict[tuple[tuple[int, ...], str], Calls] = {}


def calls_of(members: tuple[int, ...], closure: str) -> Calls:
    """The calls of a closure by these ranks. One object a process: closures may be decorated anew, and a store may outlive a group."""
    return _registered.setdefault((members, closure), Calls())


def all_passed(members: tuple[int, ...]) -> dict[str, list[int]]:
    """Of all closures that these ranks tune, on this rank."""
    return {closure: [calls.n_calls, *calls.under_way] for (ranks, closure), calls in list(_registered.items()) if ranks == members}


def last_raised(members: tuple[int, ...]) -> str:
    """What raised last in calls of these ranks on this one, of any closure; see ``Place``."""
    raised = [calls.raised for (ranks, _), calls in list(_registered.items()) if ranks == members and calls.raised]
    return raised[-1] if raised else ""
