"""One config for several sizes: whichever loses least to the best of each size.

Pure. A config's slowdown at a size is its time over the best time there; over several sizes it is their geometric mean, for which twice as
slow at one size and twice as fast at another cancel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

Latencies = Mapping[int, float]
"""Config, by its index in a space -> its time at one size."""
N_SHORTLISTED = 8


def slowdowns(by_size: Sequence[Latencies]) -> dict[int, float]:
    """Config -> geometric mean over sizes of its slowdown, of those that were measured at every size."""
    common = set.intersection(*(set(each) for each in by_size)) if by_size else set()
    best = [min(each.values()) for each in by_size if each]
    return {
        i: math.exp(math.fsum(math.log(each[i] / least) for each, least in zip(by_size, best, strict=True)) / len(best)) for i in common
    }


def shortlist(by_size: Sequence[Latencies], winners: Collection[int], failed: Collection[int]) -> list[int]:
    """Configs to measure again at all sizes: the best of each size, and the best over those sizes, by what is known. In order of index."""
    known = slowdowns([{i: t for i, t in each.items() if i not in failed} for each in by_size])
    best = sorted(known, key=lambda i: (known[i], i))[:N_SHORTLISTED]
    return sorted({*(i for i in winners if i not in failed), *best})


def choose(by_size: Sequence[Latencies]) -> int | None:
    """The config with the least slowdown over all sizes; of equals the first. None if none was measured at every size."""
    known = slowdowns(by_size)
    return min(known, key=lambda i: (known[i], i), default=None)


def gain(by_size: Sequence[Latencies], new: int, old: int) -> float:
    """By which share ``new`` is faster than ``old`` over all sizes: 0.03 is 3 %."""
    return math.exp(math.fsum(math.log(each[old] / each[new]) for each in by_size) / len(by_size)) - 1
