"""Who compiles what: each distinct kernel once per host, spread over the ranks that need it.

Pure. A compile key says which file of Triton's disk cache a candidate becomes; ranks may have different keys for one candidate
(an integer argument that is 1 on one rank, an unaligned tensor), and ranks of different hosts do not see each other's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEY_CHARS = 12
"""Length of a compile key as ranks compare it."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a rank compiles, and what it has begun with before anybody could be asked."""

    host: str
    """The machine and Triton's cache folder on it: ranks with the same one share files."""
    position: int
    """Of this rank among the ranks of its host, as far as it knows."""
    n_ranks: int
    """Ranks of this host, as far as it knows."""


@dataclass(frozen=True, slots=True)
class Keyset:
    """Ranks of one host that have the same compile keys for a site."""

    host: str
    keys: str
    """One key of ``KEY_CHARS`` per candidate, in a row; blank where there is nothing to compile."""
    ranks: list[int]
    positions: list[int]
    n_ranks: int


def guessed_share(n_candidates: int, bench: Bench) -> set[int]:
    """What a rank begins with: its part, if all ranks of its host have the same keys."""
    return set(range(bench.position, n_candidates, bench.n_ranks))


def share(rank: int, keysets: Sequence[Keyset]) -> set[int]:
    """The candidates of a site that ``rank`` compiles for itself and for all on its host that have the same key.

    The one that has begun with it, or else one of them by turns.
    """
    own = next((each for each in keysets if rank in each.ranks), None)
    if own is None:
        return set()
    mine = set()
    alike = [each for each in keysets if each.host == own.host]
    for i, key in enumerate(split_keys(own.keys)):
        having = [each for each in alike if split_keys(each.keys)[i : i + 1] == [key]]
        holders = sorted(pair for each in having for pair in zip(each.ranks, each.positions, strict=True))
        begun = [holder for holder, position in holders if i % own.n_ranks == position]
        if key.strip() and (begun[0] if begun else holders[i % len(holders)][0]) == rank:
            mine.add(i)
    return mine


def split_keys(keys: str) -> list[str]:
    """The keys of a keyset, one per candidate."""
    return [keys[i : i + KEY_CHARS] for i in range(0, len(keys), KEY_CHARS)]
