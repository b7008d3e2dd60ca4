"""Partition of compilations: each distinct kernel once per host, spread over the ranks that need it.

Pure: estimates from configs and compile keys, so that ranks with the same input deal alike without asking each other. A compile
key names the file in Triton's disk cache that a candidate becomes. Ranks may have different keys for one candidate (an integer
argument that is 1 on one rank, an unaligned tensor), and ranks of different hosts do not see each other's files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton

KEY_CHARS = 12
"""Length of a compile key as ranks compare it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank's place among the ranks of its host, as far as it knows before the first meeting."""

    host: str
    """The machine and Triton's cache folder on it: ranks with the same one share files."""
    position: int
    """Of this rank among the ranks of its host."""
    n_ranks: int
    """Ranks of this host."""


@dataclass(frozen=True, slots=True)
class CompileKeys:
    """Ranks of one host that have the same compile keys for a site."""

    host: str
    keys: str
    """One key of ``KEY_CHARS`` per candidate, in a row, blank if there is nothing to compile; empty if the whole host has the same."""
    ranks: list[int]
    positions: list[int]
    n_ranks: int


def compile_cost(config: triton.Config) -> float:
    """Estimated time to compile, relative to other configs of the kernel: the product of its two largest block sizes, per warp.

    Rank correlation 0.9 with the measured time over 216 configs of a GEMM (logs/compile-cpu).
    """
    return float(prod(_blocks(config)[:2]) / config.num_warps)


def order(config: triton.Config) -> tuple[float, int]:
    """Sort key: the longest compilation first; of equals the smallest tiles, because configs that exceed shared memory end early."""
    return -compile_cost(config), prod(_blocks(config)) * config.num_stages


def quickest(configs: Sequence[triton.Config]) -> list[int]:
    """Candidates from the quickest to compile to the slowest, by estimate; the same on all ranks."""
    return sorted(range(len(configs)), key=lambda i: (compile_cost(configs[i]), prod(_blocks(configs[i])), configs[i].num_stages, i))


def partition_configs(configs: list[triton.Config], n_ranks: int, wanted: Collection[int] | None = None) -> list[int]:
    """Candidate -> position of the rank of its host that compiles it; the same on all ranks. -1 for those that are not ``wanted``.

    Candidates that differ in warps and stages alone stay together, because Triton's front end makes the same TTIR of them; even more so
    those that differ in stages alone, which may come to the same kernel.
    """
    indices = range(len(configs)) if wanted is None else sorted(wanted)
    costs = [compile_cost(configs[i]) for i in indices]
    kin = [repr({**configs[i].all_kwargs(), "num_stages": None}) for i in indices]
    found = partition(costs, [str(configs[i].kwargs) for i in indices], n_ranks, kin)
    positions = dict(zip(indices, found, strict=True))
    return [positions.get(i, -1) for i in range(len(configs))]


def partition(compile_costs: Sequence[float], groups: Sequence[str], n_ranks: int, kin: Sequence[str] = ()) -> list[int]:
    """Candidate -> position of the rank that compiles it if all ranks of the host have the same keys; costs are balanced.

    Candidates of a group share part of the work, so a group is split only if it exceeds half of a rank's share; those of equal ``kin``
    in it only if they exceed all of one.
    """
    share = -(-len(compile_costs) // n_ranks)
    largest = -(-share // 2)
    members: dict[str, dict[str, list[int]]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, {}).setdefault(kin[i] if kin else str(i), []).append(i)
    pieces: list[list[int]] = []
    for families in members.values():
        pieces.append([])
        for family in families.values():
            if len(pieces[-1]) + len(family) > largest:
                pieces.append([])
            whole = family if len(family) <= share else []
            pieces[-1] += whole
            pieces += [family[k : k + largest] for k in range(0, len(family), largest)] if not whole else []
    pieces = [each for each in pieces if each]
    loads, positions = [0.0] * n_ranks, [0] * len(compile_costs)
    for piece in sorted(pieces, key=lambda piece: (-sum(compile_costs[i] for i in piece), piece)):
        position = loads.index(min(loads))
        loads[position] += sum(compile_costs[i] for i in piece)
        for i in piece:
            positions[i] = position
    return positions


def own_share(rank: int, compile_keys: Sequence[CompileKeys], partitions: Mapping[int, Sequence[int]]) -> set[int]:
    """Candidates of a site that ``rank`` compiles for all ranks of its host with the same key.

    ``partitions``: number of ranks -> position per candidate. The rank that has already started a candidate goes on with it;
    if none has, the ranks that need it take candidates in turn.
    """
    own = next((each for each in compile_keys if rank in each.ranks), None)
    if own is None:
        return set()
    share = set()
    own_keys = split_keys(own.keys)
    of_host = [(each, split_keys(each.keys)) for each in compile_keys if each.host == own.host]
    for i in range(len(partitions[own.n_ranks])):
        if own_keys and not own_keys[i].strip():
            continue
        needing = [each for each, keys in of_host if not own_keys or keys[i : i + 1] == own_keys[i : i + 1]]
        places = sorted(
            place for each in needing for place in zip(each.ranks, each.positions, [each.n_ranks] * len(each.ranks), strict=True)
        )
        started = [holder for holder, position, n_ranks in places if partitions[n_ranks][i] == position]
        if rank == (started[0] if started else places[i % len(places)][0]):
            share.add(i)
    return share


def split_keys(keys: str) -> list[str]:
    """The compile keys in a row, one per candidate."""
    return [keys[i : i + KEY_CHARS] for i in range(0, len(keys), KEY_CHARS)]


def _blocks(config: triton.Config) -> list[int]:
    return sorted((value for value in config.kwargs.values() if type(value) is int and value > 1), reverse=True)
