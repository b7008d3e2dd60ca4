"""Programs of tuning scripts that tests start, and kill."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from dist_tune.offline import tune_kernel


def noted(folder: str, what: str) -> int:
    """Write down that something ran; how often it did."""
    with open(f"{folder}/{what}", "a") as file:
        file.write("x")
    return os.path.getsize(f"{folder}/{what}")


def main(folder: str, dies_at: int, n_deaths: int) -> None:
    """Tune twelve configs, the eighth is fastest; the process is killed where one runs, so many times; with 100 added, asked to end."""

    def make(config: dict[str, Any]) -> Any:
        i = config["i"]

        def run() -> torch.Tensor:
            noted(folder, f"run-{i}")
            if i == dies_at % 100 and noted(folder, "died") <= n_deaths:
                os.kill(os.getpid(), signal.SIGKILL if dies_at < 100 else signal.SIGTERM)
            time.sleep(0.005 * (1 + abs(i - 7)))
            return torch.ones(2)

        noted(folder, f"made-{i}")
        return run, torch.ones(2)

    print(tune_kernel([{"i": i} for i in range(12)], make, num_iters=5, name="program")["i"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
