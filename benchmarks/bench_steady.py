"""What a steady call of a tuned closure costs more than a bare ``triton.autotune`` launch, on the
host.

No GPU needed: the fake H200 driver of ``dist_tune.testing`` compiles for real and launches nothing,
so that only Python is timed. Target: a tuned call costs at most 1 us more than a bare one, for each
kind of arguments in the table that this prints. Each round is short, so that other processes
interrupt few of them.

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

N_ROUNDS, N_CALLS = 4000, 20


@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n", "m", "k"])
@triton.jit
def kernel(a, b, c, n, m, k, sa0, sa1, sb0, sb1, sc0, sc1, BLOCK: tl.constexpr):
    """Adds; never run."""
    tl.store(
        c + tl.arange(0, BLOCK), tl.load(a + tl.arange(0, BLOCK)) + tl.load(b + tl.arange(0, BLOCK))
    )


@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"])
@triton.jit
def small_kernel(x, y, n, BLOCK: tl.constexpr):
    """Copies; never run. Triton looks its config up faster than that of the other kernel."""
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))


class Plain:
    """An object with a step, and no other attribute."""

    def bare(self, x: torch.Tensor) -> Any:
        """Launch."""
        return small_kernel[(1,)](x, x, 64)

    tuned = contextual_autotune(cache=False)(bare)


class Module(torch.nn.Module):
    """A module with a step."""

    def bare(self, x: torch.Tensor) -> Any:
        """Launch."""
        return small_kernel[(1,)](x, x, 64)

    tuned = contextual_autotune(cache=False)(bare)


def arguments_of_each_kind() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name of a kind of arguments -> a bare call with them, and a tuned one."""
    x, y = torch.zeros(64), torch.zeros(64)

    def bare(*args: Any, a: Any = None, b: Any = None) -> Any:
        return small_kernel[(1,)](x, y, 64)

    tuned = contextual_autotune(cache=False)(bare)
    plain, module = Plain(), Module()
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "small kernel, no arguments": ((), {}),
        "a tensor": ((x,), {}),
        "two tensors": ((x, y), {}),
        "eight tensors": ((x,) * 8, {}),
        "two tensors and a float": ((x, y, 0.5), {}),
        "an int, a bool and a string": ((4, True, "silu"), {}),
        "a float": ((0.5,), {}),
        "None": ((None,), {}),
        "a parameter and a tensor": ((torch.nn.Parameter(torch.zeros(64)), x), {}),
        "an object and a tensor": ((plain, x), {}),
        "a list of eight tensors": (([x] * 8,), {}),
        "a dict of four tensors": ((dict.fromkeys("abcd", x),), {}),
        "two tensors by name": ((), {"a": x, "b": y}),
        "an int and a bool by name": ((), {"a": 4, "b": True}),
        "a tensor, and a float by name": ((x,), {"a": 0.5}),
    }
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "method of an object, a tensor": (partial(plain.bare, x), partial(plain.tuned, x)),
        "method of a module, a tensor": (partial(module.bare, x), partial(module.tuned, x)),
    }
    for name, (args, kwargs) in calls.items():
        pairs[name] = partial(bare, *args, **kwargs), partial(tuned, *args, **kwargs)
    return pairs


def us_per_call(bare: Callable[[], Any], tuned: Callable[[], Any]) -> tuple[float, float, float]:
    """Microseconds of each call and of the difference: medians over rounds in which both run, so
    that a busy machine hurts both.
    """
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
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "closure without arguments": (plain, tuned),
        "closure of two tensors": (partial(plain_of, a, b), partial(tuned_of, a, b)),
        **arguments_of_each_kind(),
    }
    for _, ours in pairs.values():
        ours()
    table = Table(
        "steady call",
        "bare us",
        "tuned us",
        "more us",
        title=f"torch {torch.__version__}, triton {triton.__version__}",
    )
    for name, (bare, ours) in pairs.items():
        table.add_row(name, *(f"{us:.2f}" for us in us_per_call(bare, ours)))
    for name in ("another_kernel", "kernel"):  # from here on the process has a step with buckets
        bucketed = contextual_autotune(cache=False, bucket={name: {"n": power_of_two}})(plain)
        bucketed()
        table.add_row(
            f"the same, {name} in buckets", *(f"{us:.2f}" for us in us_per_call(plain, bucketed))
        )
    Console().print(table)


if __name__ == "__main__":
    main()
