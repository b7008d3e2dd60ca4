"""Guided search beside racing, played through the real search on all recorded tables: regret, and
candidates compiled. No GPU.

python -m benchmarks.guided_tables          # logs/guided-decorators-cpu has what it prints

Each run has the candidates in another order, because the first one and the order of equals decide
where the search begins.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.search_costs import load_full_tables
from benchmarks.simulator import Played, play
from benchmarks.timing_tables import load_tables
from benchmarks.worlds import Kernel, World, kernel_of
from dist_tune.configs import describe
from dist_tune.search import NOT_TRIED, Plan, SearchName

LIMIT = 0.01
"""Regret that counts as none."""


def kernels() -> dict[str, Kernel]:
    """All recorded tables, by name: those of the AllGather-GEMM on four ranks, and those of a full
    space on one device.
    """
    found = {name: kernel_of(table) for name, table in load_tables().items()}
    for each in load_full_tables():
        failures = {i: "did not run" for i, us in enumerate(each.us) if us is None}
        ms = [[us / 1e3 if us is not None else 1.0] for us in each.us]
        found[each.problem.rpartition("SCALE-")[2]] = Kernel(
            ms, failures=failures, texts=[describe(config) for config in each.configs]
        )
    return found


def shuffled(kernel: Kernel, seed: int) -> Kernel:
    """The same candidates in another order."""
    order = list(range(len(kernel.ms)))
    random.Random(seed).shuffle(order)
    return replace(
        kernel,
        ms=[kernel.ms[i] for i in order],
        unseen_ms=[kernel.unseen_ms[i] for i in order] if kernel.unseen_ms else (),
        failures={
            place: kernel.failures[i] for place, i in enumerate(order) if i in kernel.failures
        },
        texts=[kernel.texts[i] for i in order],
    )


def runs_of(kernel: Kernel, search: SearchName, n_runs: int) -> list[Played]:
    """Tunings of one site, each with other noise and another order of candidates."""
    worlds = (
        World({"site": shuffled(kernel, seed)}, n_ranks=len(kernel.ms[0])) for seed in range(n_runs)
    )
    return [play(world, Plan(search=search), seed=seed) for seed, world in enumerate(worlds)]


def n_compiled(run: Played) -> int:
    """Candidates that were compiled, those that did not fit the device included."""
    return sum(each.left != NOT_TRIED for each in run.search["site"].results())


def n_timed(run: Played) -> int:
    """Candidates that were timed."""
    return sum(each.times is not None for each in run.search["site"].results())


def line(name: str, search: SearchName, runs: Sequence[Played]) -> str:
    """Quantiles of the regret, the share of runs without one, and the cost."""
    regrets = sorted(run.regret for run in runs)
    at_95 = regrets[math.ceil(0.95 * len(regrets)) - 1]
    within = sum(regret <= LIMIT for regret in regrets) / len(regrets)
    return (
        f"{name:34} {search:7} runs={len(runs):<4} regret median={statistics.median(regrets):6.2%}"
        f" at_95%={at_95:6.2%} worst={regrets[-1]:6.2%} within_1%={within:6.1%}"
        f" compiled={statistics.mean(map(n_compiled, runs)):6.1f}"
        f" timed={statistics.mean(map(n_timed, runs)):6.1f} of"
        f" {len(runs[0].search['site'].results())}"
        f" replays={statistics.mean(run.n_replays for run in runs):6.1f}"
    )


def main(n_runs: Mapping[str, int]) -> None:
    """Print a line for each table and search, and one for all tables together."""
    found = kernels()
    searches: tuple[SearchName, ...] = ("racing", "guided")
    for search in searches:
        together: list[Played] = []
        for name, kernel in found.items():
            is_full = len(kernel.ms) > 1000
            # All of 3,645 candidates take minutes to play, and are what offline tuning is for.
            if is_full and search == "racing":
                continue
            runs = runs_of(kernel, search, n_runs["full" if is_full else "small"])
            together += runs if is_full else runs[: n_runs["full"]]
            print(line(name, search, runs), flush=True)
        if search == "guided":
            regrets = [run.regret for run in together]
            share = sum(regret <= LIMIT for regret in regrets) / len(regrets)
            print(f"{len(found)} tables with {n_runs['full']} runs of each: within_1%={share:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--runs", type=int, default=200, help="tunings of each table of a few hundred candidates"
    )
    parser.add_argument(
        "--full-runs", type=int, default=20, help="tunings of each table of a full space"
    )
    args = parser.parse_args()
    main({"small": args.runs, "full": args.full_runs})
