"""Jobs on the fake H200 that are tuned online: 64 candidates at each of three sites, a collective,
noise, hiccups and late ranks.

    python -m benchmarks.online_jobs --ranks 2 --runs 5

Prints, for each run, the calls from the first batch to the winners' first call, the regret of the
step and what the trials cost the job.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import FakeH200, on_ranks, values
from tests.steps import accumulate_kernel, add_kernel, atomic_kernel, autotuned, launch

KERNELS = add_kernel, accumulate_kernel, atomic_kernel
CONFIGS = [*product((16, 32, 64, 128), (1, 2, 4, 8), (0, 32, 64, 128))]
"""Block, warps, and most registers of a thread (0: no bound), which make 64 different kernels."""
OTHER_MS, NOISE, HICCUPS, LATE = 2.0, 0.02, 0.01, 0.02
"""What else is in a step; deviation of a launch's time; share of launches that take 1.5 times as
long, and of steps 10 ms later.
"""


def job(rank: int, seed: int, n_most: int) -> tuple[float, bool]:
    """The step's regret, and whether each call gave the untuned value; calls the step until it is
    tuned.
    """
    dice, mine = random.Random(seed), random.Random(f"{seed} {rank}")
    ms = {
        (kernel.__name__, config): 0.3 * (1 + abs(dice.gauss(0, 0.4)))
        for kernel in KERNELS
        for config in CONFIGS
    }

    def launch_ms(source: Any, metadata: Any) -> float:
        names = source.fn.arg_names
        block = next(value for at, value in source.constants.items() if names[at[0]] == "BLOCK")
        noisy = ms[
            source.fn.__name__, (block, metadata.num_warps, metadata.maxnreg or 0)
        ] * mine.lognormvariate(0, NOISE)
        return noisy * (1.5 if mine.random() < HICCUPS else 1.0)

    FakeH200.launch_ms = staticmethod(launch_ms)
    configs = [
        triton.Config({"BLOCK": block}, num_warps=warps, maxnreg=regs or None)
        for block, warps, regs in CONFIGS
    ]
    kernels = [autotuned(each, configs=list(configs)) for each in KERNELS]
    x, weight = torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=True)
    def step() -> float:
        for each in kernels:
            launch(each, x)
        weight.add_(1.0)
        time.sleep(OTHER_MS / 1e3 + 0.01 * (mine.random() < LATE))
        dist.all_reduce(weight.clone())
        return float(weight)

    found = list[float]()
    is_over = torch.zeros(1)
    while not is_over and len(found) < n_most:
        found.append(step())
        is_over.fill_(bool(step.records))
        dist.all_reduce(is_over, dist.ReduceOp.MIN)
    best = [next(iter(each.cache.values())) for each in kernels]
    chosen = sum(
        ms[k.__name__, (c.kwargs["BLOCK"], c.num_warps, c.maxnreg or 0)]
        for k, c in zip(KERNELS, best, strict=True)
    )
    least = sum(min(ms[kernel.__name__, config] for config in CONFIGS) for kernel in KERNELS)
    return (chosen - least) / (least + OTHER_MS), found == [k + 1.0 for k in range(len(found))]


def main() -> None:
    """Run some jobs, each on new ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    for seed in range(options.runs):
        outcomes = on_ranks(options.ranks, job, seed, 20_000, mode="fake", timeout_s=300)
        (regret, is_right), *_ = values(outcomes)
        (told,) = re.findall(r"tuned in .*job's time", outcomes[0].log)
        print(
            f"ranks={options.ranks} seed={seed} regret={regret:.2%} values_right={is_right} {told}",
            flush=True,
        )


if __name__ == "__main__":
    main()
