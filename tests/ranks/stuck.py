"""Configs that never return, for the tests of the watchdog."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import Outcome
from tests.ranks.kernels import autotuned, best, launch

BLOCKS = (16, 32, 64, 128)
free = threading.Event()
"""Ends the hang "event" of this process."""


def threads_left() -> list[str]:
    """Names of the watchdog's threads in this process."""
    return [each.name for each in threading.enumerate() if "watchdog" in each.name]


def left_with(outcome: Outcome, code: int) -> None:
    """Assert that the rank ended its own process with this exit code."""
    assert outcome.error == "Died", f"{outcome.error} {outcome.value}: {outcome.message}\n{outcome.notes}"
    assert f"exit code {code}" in outcome.message, outcome.message


def hang(how: str) -> None:
    """Never return: in Python, in C without the interpreter lock, or with it."""
    if how == "loop":
        while True:
            pass
    if how == "event":
        free.wait()
    elif how == "sleep":
        time.sleep(1000)
    elif how == "locked":
        ctypes.PyDLL(None).sleep(1000)


def stuck_kernel(how: str, index: int, at_launch: int, log: list[int] | None = None) -> Any:
    """A kernel of four configs, one of which hangs at its n-th launch in this process (0: never)."""
    counts = dict.fromkeys(range(len(BLOCKS)), 0)

    def hook_of(own: int) -> Any:
        def hook(full: dict[str, Any]) -> None:
            counts[own] += 1
            if log is not None:
                log.append(own)
            if own == index and counts[own] == at_launch:
                hang(how)

        return hook

    return autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook_of(i)) for i, block in enumerate(BLOCKS)])


def stuck_step(rank: int, how: str, who: list[int], at_launch: int, talks: bool, options: dict[str, Any]) -> Any:
    """Tune a kernel whose config 2 hangs on some ranks; the winner, the result, failures, and threads of dist_tune that are left."""
    kernel = stuck_kernel(how, 2, at_launch if rank in who else 0)

    @contextual_autotune(is_dist=dist.is_initialized(), n_repeat=2, n_warmup=0, search="exhaustive", **options)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        if talks:
            dist.all_reduce(y)
        return y

    y = step(torch.zeros(64))
    return best(kernel), y[0].item(), [each.failure for each in step.records[0].candidates], threads_left()
