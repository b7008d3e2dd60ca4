"""Who compiles what: each distinct kernel once per host, spread over the ranks that need it.

Pure. A compile key says which file of Triton's disk cache a candidate becomes; ranks may have different keys for one candidate
(an integer argument that is 1 on one rank, an unaligned tensor), and ranks of different hosts do not see each other's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KEY_CHARS = 12
"""Length of a compile key as ranks compare it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank compiles, and what it has begun with before anybody could be asked."""

    host: str
    """The machine and Triton's cache folder on it: ranks with the same one share files."""
    position: int
    """Of this rank among the ranks of its host, as far as it knows."""
    n_ranks: int
    """Ranks of this host, as far as it knows."""


@dataclass(frozen=True, slots=True)
class CompileKeys:
    """Ranks of one host that have the same compile keys for a site."""

    host: str
    keys: str
    """One key of ``KEY_CHARS`` per candidate, in a row, blank where there is nothing to compile; empty if all of the host have the same."""
    ranks: list[int]
    positions: list[int]
    n_ranks: int


def partition(compile_costs: Sequence[float], groups: Sequence[str], n_ranks: int) -> list[int]:
    """Candidate -> position of the rank that compiles it, if all ranks of the host have the same keys; efforts add up alike.

    Candidates of a group share part of the work, so a group stays together as long as there are several for each rank.
    """
    largest = -(-len(compile_costs) // (2 * n_ranks))
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    pieces = [each[k : k + largest] for each in members.values() for k in range(0, len(each), largest)]
    loads, positions = [0.0] * n_ranks, [0] * len(compile_costs)
    for piece in sorted(pieces, key=lambda piece: (-sum(compile_costs[i] for i in piece), piece)):
        position = loads.index(min(loads))
        loads[position] += sum(compile_costs[i] for i in piece)
        for i in piece:
            positions[i] = position
    return positions


def own_share(rank: int, compile_keys: Sequence[CompileKeys], partitions: Mapping[int, Sequence[int]]) -> set[int]:
    """The candidates of a site that ``rank`` compiles for itself and for all on its host that have the same key.

    ``partitions``: number of ranks -> how they deal. The one that has begun with a candidate, or else one of them by turns.
    """
    own = next((each for each in compile_keys if rank in each.ranks), None)
    if own is None:
        return set()
    mine = set()
    alike = [each for each in compile_keys if each.host == own.host]
    n_candidates = len(partitions[own.n_ranks])
    for i, key in enumerate(split_keys(own.keys) or ["the same"] * n_candidates):
        having = [each for each in alike if not own.keys or split_keys(each.keys)[i : i + 1] == [key]]
        holders = sorted(holder for each in having for holder in each.ranks)
        begun = sorted(
            holder
            for each in having
            for holder, position in zip(each.ranks, each.positions, strict=True)
            if partitions[each.n_ranks][i] == position
        )
        if key.strip() and (begun[0] if begun else holders[i % len(holders)]) == rank:
            mine.add(i)
    return mine


def split_keys(keys: str) -> list[str]:
    """The keys of a keyset, one per candidate."""
    return [keys[i : i + KEY_CHARS] for i in range(0, len(keys), KEY_CHARS)]
