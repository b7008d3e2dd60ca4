"""Calls of closures, counted on each rank, by which ranks tell whether they are in the same one. Pure.

Ranks make the same calls of a closure in the same order, but meet only in those that are new to some rank. A rank that waits in its third
call must not replay it with a rank that has come to its fourth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

Passed = Mapping[int, Mapping[str, list[int]]]
"""Rank -> closure -> number of its calls so far, and the numbers of those that are not over."""


@dataclass(slots=True, eq=False)
class Calls:
    """The calls of one closure on this rank."""

    n_calls: int = 0
    """Calls that are over, or that may end in a meeting; the latter are ``under_way`` until they are over."""
    under_way: list[int] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[int]:
        """A call that may end in a meeting, with its number. Calls of one name may lie within each other."""
        self.n_calls += 1
        number = self.n_calls
        self.under_way.append(number)
        try:
            yield number
        finally:
            self.under_way.remove(number)


def ahead(closure: str, number: int, passed: Passed) -> list[int]:
    """Ranks that have passed this call of a closure and will not come to a meeting about it."""
    found = {rank: calls.get(closure, [0]) for rank, calls in passed.items()}
    return [rank for rank, (n_calls, *under_way) in found.items() if n_calls >= number and number not in under_way]


def is_apart(places: Mapping[int, tuple[str, int]], passed: Passed) -> bool:
    """True if some rank waits in a call that another one has passed. ``places``: rank -> closure and number of its call."""
    return any(ahead(closure, number, passed) for closure, number in places.values())


_registered: dict[tuple[tuple[int, ...], str], Calls] = {}


def calls_of(members: tuple[int, ...], closure: str) -> Calls:
    """The calls of a closure by these ranks. One object a process: closures may be decorated anew, and a store may outlive a group."""
    return _registered.setdefault((members, closure), Calls())


def all_passed(members: tuple[int, ...]) -> dict[str, list[int]]:
    """Of all closures that these ranks tune, on this rank."""
    return {closure: [calls.n_calls, *calls.under_way] for (ranks, closure), calls in list(_registered.items()) if ranks == members}
