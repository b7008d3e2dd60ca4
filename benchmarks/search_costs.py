"""How near to the best config a search comes with how many tries, played on recorded tables of a full space: no GPU.

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
from typing import Any

from benchmarks.timing_tables import TABLES
from dist_tune.search import SearchStrategy, make_strategy

NOISE = 0.01
"""Standard deviation of the logarithm of a measured time."""
SHARES = (0.01, 0.02, 0.03, 0.05, 0.1)
"""Of the space, tried."""


@dataclass(frozen=True)
class FullTable:
    """A kernel's times at one size, for each config of its space, in microseconds; None where it does not run."""

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


def regrets(table: FullTable, search: SearchStrategy, n_tries: int, seed: int, batch: int = 64) -> list[float]:
    """After each try, by how much the config that looks best so far is slower than the best of the table; the search sees noisy times."""
    dice = random.Random(seed)
    strategy = make_strategy(search, table.configs, n_tries, seed)
    seen_ms: dict[int, float] = {}
    found: list[float] = []
    while proposed := strategy.propose(batch):
        for i in proposed:
            us = table.us[i]
            if us is not None:
                seen_ms[i] = us / 1e3 * math.exp(dice.gauss(0.0, NOISE))
            looks_best = min(seen_ms, key=seen_ms.__getitem__, default=None)
            # The few that look best are measured again in finals, so noise costs no more than the best of them.
            near = [j for j in seen_ms if looks_best is not None and seen_ms[j] <= seen_ms[looks_best] * (1 + 3 * NOISE)]
            found.append(min((table.us[j] or math.inf for j in near), default=math.inf) / table.best_us - 1)
        strategy.tell({i: seen_ms[i] for i in proposed if i in seen_ms}, [i for i in proposed if i not in seen_ms])
    return found


def summary(tables: Sequence[FullTable], search: SearchStrategy, n_seeds: int) -> str:
    """Share of runs within 2 % and 5 % of the best, after so many tries; each number of tries is a search of its own."""
    lines = []
    for own_share in SHARES:
        n_tries = math.floor(own_share * len(tables[0].configs))
        ends = [regrets(table, search, n_tries, seed)[-1] for table in tables for seed in range(n_seeds)]
        within = [sum(end <= limit for end in ends) / len(ends) for limit in (0.02, 0.05)]
        lines.append(
            f"{search:10} tries={n_tries:<5} ({own_share:.0%} of the space) within_2%={within[0]:6.1%} within_5%={within[1]:6.1%} "
            f"worst={max(ends):.1%} runs={len(ends)}"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main(n_seeds: int = 4) -> None:
    """Print the table of all searches."""
    tables = load_full_tables()
    print(f"{len(tables)} problems of {len(tables[0].configs)} configs, noise {NOISE:.0%}, {n_seeds} runs each")
    for search in ("racing", "random", "guided"):
        summary(tables, search, n_seeds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("n_seeds", nargs="?", type=int, default=4, help="searches of each kind at each problem")
    main(parser.parse_args().n_seeds)
