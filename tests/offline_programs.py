"""Programs of tuning scripts that tests start, and kill."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from dist_tune.offline import Outcome, Problem, tune_problems


def noted(folder: str, what: str) -> int:
    """Write down that something ran; how often it did."""
    with open(f"{folder}/{what}", "a") as file:
        file.write("x")
    return os.path.getsize(f"{folder}/{what}")


def main(folder: str, dies_at: int, from_run: int, n_deaths: int, how: int) -> None:
    """Tune twelve configs, the eighth is fastest; so many times a run of one, from its ``from_run``-th on, gets the signal ``how``."""

    def make(config: dict[str, Any]) -> Any:
        i = config["i"]

        def run() -> torch.Tensor:
            n_runs = noted(folder, f"run-{i}")
            if i == dies_at and n_runs >= from_run and noted(folder, "died") <= n_deaths:
                os.kill(os.getpid(), how)
            time.sleep(0.002 * (1 + abs(i - 7)))
            return torch.ones(2)

        return run, torch.ones(2)

    (ended,) = tune_problems([Problem("program", [{"i": i} for i in range(12)], make)], num_iters=5)
    assert isinstance(ended, Outcome)
    print(ended.winner, ended.n_resumed, *ended.failures)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main(sys.argv[1], *map(int, sys.argv[2:]))
