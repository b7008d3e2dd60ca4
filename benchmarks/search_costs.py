"""How near to the best config a search comes with how many tries, played on recorded tables of a
full space: no GPU.

python -m benchmarks.search_costs          # logs/guided-search has what it prints
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from benchmarks.timing_tables import TABLES
from dist_tune.configs import describe
from dist_tune.search import Guide

Search = Literal["random", "guided"]

NOISE = 0.01
"""Standard deviation of the logarithm of a measured time."""
SHARES = (0.01, 0.02, 0.03, 0.05, 0.1)
"""Of the space, tried."""


@dataclass(frozen=True)
class FullTable:
    """A kernel's times at one size, for each config of its space, in microseconds; None where it
    does not run.
    """

    problem: str
    configs: Sequence[Mapping[str, Any]]
    us: Sequence[float | None]

    @property
    def best_us(self) -> float:
        """The least."""
        return min(us for us in self.us if us is not None)


def load_full_tables() -> list[FullTable]:
    """The tables of launch/tune_a8w8_blockscale.py --record, as benchmarks/tables keeps them."""
    content = json.loads(gzip.decompress((TABLES / "a8w8-full-space-H200.json.gz").read_bytes()))
    configs = [dict(zip(content["fields"], row, strict=True)) for row in content["configs"]]
    return [FullTable(each["problem"], configs, each["us"]) for each in content["problems"]]


def regrets(table: FullTable, search: Search, n_tries: int, seed: int) -> list[float]:
    """After each wave, by how much the config that looks best so far is slower than the best of the
    table; the search sees noisy times.

    Each run has the configs in another order, because the first one and the order of equals decide
    where a search begins.
    """
    dice = random.Random(f"{table.problem} {seed}")
    order = dice.sample(range(len(table.us)), len(table.us))
    guide = (
        Guide([describe(table.configs[i]) for i in order], n_tries) if search == "guided" else None
    )
    seen_ms: dict[int, float] = {}
    failed = set[int]()
    found: list[float] = []
    wave = guide.spread if guide is not None else list(range(n_tries))
    while wave:
        for k in wave:
            us = table.us[order[k]]
            if us is None:
                failed.add(k)
            else:
                seen_ms[k] = us / 1e3 * math.exp(dice.gauss(0.0, NOISE))
        # The few that look best are measured again in finals, so noise costs no more than the best
        # of them.
        near = [k for k, ms in seen_ms.items() if ms <= min(seen_ms.values()) * (1 + 3 * NOISE)]
        found.append(
            min((table.us[order[k]] or math.inf for k in near), default=math.inf) / table.best_us
            - 1
        )
        wave = guide.wave(seen_ms, failed) if guide is not None else []
    return found


def summary(tables: Sequence[FullTable], search: Search, n_seeds: int) -> str:
    """Share of runs within 2 % and 5 % of the best, after so many tries; each number of tries is a
    search of its own.
    """
    lines = []
    for own_share in SHARES:
        n_tries = math.floor(own_share * len(tables[0].configs))
        ends = [
            regrets(table, search, n_tries, seed)[-1] for table in tables for seed in range(n_seeds)
        ]
        within = [sum(end <= limit for end in ends) / len(ends) for limit in (0.02, 0.05)]
        lines.append(
            f"{search:10} tries={n_tries:<5} ({own_share:.0%} of the space)"
            f" within_2%={within[0]:6.1%} within_5%={within[1]:6.1%} worst={max(ends):.1%}"
            f" runs={len(ends)}"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main(n_seeds: int = 4) -> None:
    """Print the table of all searches."""
    tables = load_full_tables()
    print(
        f"{len(tables)} problems of {len(tables[0].configs)} configs, noise {NOISE:.0%}, {n_seeds}"
        " runs each"
    )
    for search in get_args(Search):
        summary(tables, search, n_seeds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "n_seeds", nargs="?", type=int, default=4, help="searches of each kind at each problem"
    )
    main(parser.parse_args().n_seeds)
