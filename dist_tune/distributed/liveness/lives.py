"""Beats of ranks as they stand on the store: where each rank is, since when, and what that tells of a collective left by one of them.

Pure but for reading a store; knows nothing of the thread that beats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from dist_tune.distributed.liveness.host_processes import UNKNOWN, state_of
from dist_tune.distributed.protocol.calls import Place
from dist_tune.distributed.protocol.parts import absent


@dataclass(frozen=True, slots=True)
class Life:
    """One beat of a rank. A JSON object."""

    n_beats: int
    call: Place
    """The call that it is in."""
    doing: str
    for_s: float
    """Seconds that it has done that."""
    may_last: bool = False
    """True in what may take any time: its first run, compilation, loading."""
    process: str = ""
    """See ``process_name``."""
    n_issued: int = 0
    """Collectives issued so far, on all groups."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Number of a run that has ended, and collectives that it issued."""
    odd: dict[str, str] = field(default_factory=dict)
    """Number of a run with another number of collectives than most -> what it ran."""
    troubles: list[str] = field(default_factory=list)
    """Candidates that failed here between two of their collectives."""

    @property
    def text(self) -> str:
        """Place and time, for people."""
        return f"{self.doing} of {self.call.text} for {self.for_s:.1f} s" if self.call.closure else self.doing


LIFE = TypeAdapter(Life)


def lives_of(store: dist.Store, ranks: Sequence[int]) -> dict[int, Life]:
    """The latest beat of each of these ranks that has beaten; one that cannot be read is left out."""
    keys = [f"alive/{rank}" for rank in ranks]
    lacking = set(absent(store, keys))
    known = [rank for rank, key in zip(ranks, keys, strict=True) if key not in lacking]
    lives = {}
    for rank, text in zip(known, store.multi_get([f"alive/{rank}" for rank in known]) if known else [], strict=True):
        with suppress(ValidationError):
            lives[rank] = LIFE.validate_json(text)
    return lives


def state_of_rank(store: dist.Store, rank: int) -> str:
    """State of a rank's process, as far as this host can see it."""
    life = lives_of(store, [rank]).get(rank)
    return state_of(life.process) if life is not None else UNKNOWN


def cause_of(lives: Mapping[int, Life]) -> tuple[int, str] | None:
    """The rank that left others in a collective, and how: a candidate that failed there, or a run with fewer collectives than elsewhere."""
    for rank, life in lives.items():
        if life.troubles:
            return rank, f"left {life.troubles[0]}, between two of its collectives"
    counts: dict[int, dict[int, int]] = {}
    for rank, life in lives.items():
        for number, count in life.runs:
            counts.setdefault(number, {})[rank] = count
    usual = Counter(count for each in counts.values() for count in each.values()).most_common(1)
    for number, by_rank in sorted(counts.items()):
        expected = max([*by_rank.values(), usual[0][0]])
        rank = min(by_rank, key=by_rank.__getitem__)
        if by_rank[rank] < expected and (len(set(by_rank.values())) > 1 or len(by_rank) < len(lives)):
            what = next((life.odd[str(number)] for life in lives.values() if str(number) in life.odd), f"run {number}")
            return rank, f"issued {by_rank[rank]} collectives where {expected} are usual, in {what}"
    return None
