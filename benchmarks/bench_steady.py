"""What a steady call of a tuned closure costs more than a bare ``triton.autotune`` launch, on the host.

No GPU needed: the fake H200 driver of ``dist_tune.testing`` compiles for real and launches nothing, so that only Python is timed.
Target: at most 1 us more.

    .venv/bin/python benchmarks/bench_steady.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TRITON_INTERPRET"] = "0"  # real compilation, on the fake driver
os.environ["DIST_TUNE_VERBOSITY"] = "quiet"

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table

from dist_tune import contextual_autotune, power_of_two
from dist_tune.testing import FakeH200, install_fake_driver

N_ROUNDS, N_CALLS = 400, 200


@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n", "m", "k"])
@triton.jit
def kernel(a, b, c, n, m, k, sa0, sa1, sb0, sb1, sc0, sc1, BLOCK: tl.constexpr):
    """Adds; never run."""
    tl.store(c + tl.arange(0, BLOCK), tl.load(a + tl.arange(0, BLOCK)) + tl.load(b + tl.arange(0, BLOCK)))


def us_per_call(bare: Callable[[], Any], tuned: Callable[[], Any]) -> tuple[float, float, float]:
    """Microseconds of each call and of the difference: medians over rounds in which both run, so that a busy machine hurts both."""
    rounds = []
    for _ in range(N_ROUNDS):
        us = []
        for function in (bare, tuned):
            began = time.perf_counter()
            for _ in range(N_CALLS):
                function()
            us.append((time.perf_counter() - began) / N_CALLS * 1e6)
        rounds.append((us[0], us[1], us[1] - us[0]))
        FakeH200.launches.clear()
    first, second, difference = (median(column) for column in zip(*rounds, strict=True))
    return first, second, difference


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    install_fake_driver()
    FakeH200.launch_ms = staticmethod(lambda src, metadata: 0.0)
    a, b, c = torch.zeros(64), torch.zeros(64), torch.zeros(64)

    def plain() -> Any:
        return kernel[(1,)](a, b, c, 64, 64, 64, 64, 1, 64, 1, 64, 1)

    def plain_of(a: torch.Tensor, b: torch.Tensor) -> Any:
        return kernel[(1,)](a, b, c, 64, 64, 64, 64, 1, 64, 1, 64, 1)

    tuned, tuned_of = (contextual_autotune(cache=False)(each) for each in (plain, plain_of))
    tuned()
    tuned_of(a, b)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "closure without arguments": (plain, tuned),
        "closure of two tensors": (partial(plain_of, a, b), partial(tuned_of, a, b)),
    }
    table = Table("steady call", "bare us", "tuned us", "more us", title=f"torch {torch.__version__}, triton {triton.__version__}")
    for name, (bare, ours) in pairs.items():
        table.add_row(name, *(f"{us:.2f}" for us in us_per_call(bare, ours)))
    for name in ("another_kernel", "kernel"):  # from here on the process has a step with buckets
        bucketed = contextual_autotune(cache=False, bucket={name: {"n": power_of_two}})(plain)
        bucketed()
        table.add_row(f"the same, {name} in buckets", *(f"{us:.2f}" for us in us_per_call(plain, bucketed)))
    Console().print(table)


if __name__ == "__main__":
    main()
