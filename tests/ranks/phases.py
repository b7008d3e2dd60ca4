"""A step of two kernels and two collectives, and something that goes wrong on one rank in a phase of its tuning."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.tuning import entering, racing, tuning
from tests.ranks.kernels import accumulate_kernel, add_kernel, autotuned, best, launch

PHASES = ("discover", "compile", "race", "finals", "apply")
DEADLINE_S = 5.0


def stop_for(seconds: float) -> None:
    """Stop this process, as SIGSTOP does, and let it go on after so many seconds."""
    me = os.getpid()
    with subprocess.Popen(["/bin/sh", "-c", f"kill -STOP {me}; sleep {seconds}; kill -CONT {me}"]):
        pass


def once_in(phase: str, act: Callable[[], object]) -> Callable[[], None]:
    """A function that the step calls in each run, which acts once: in the first run of that phase, or while it compiles."""
    now, acted = ["discover"], list[int]()

    def fire() -> None:
        if now[0] == phase and not acted:
            acted.append(1)
            act()

    def note(module: Any, name: str, begins: str) -> None:
        function = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            now[0] = begins
            if begins == "compile":
                fire()
            return function(*args, **kwargs)

        setattr(module, name, noted)

    note(entering, "compile_new", "compile")
    note(tuning, "run_race", "race")
    note(racing, "finals_of", "finals")
    note(tuning, "apply_winners", "apply")
    return fire


def two_kernels(fire: Callable[[], object], blocks: tuple[int, ...] = (16, 32, 64, 128), **options: Any) -> Any:
    """The tuned step, and a function that tells its winners."""
    kernels = [
        autotuned(kernel, configs=[triton.Config({"BLOCK": block}) for block in blocks]) for kernel in (add_kernel, accumulate_kernel)
    ]

    @contextual_autotune(**{"is_dist": True, "n_repeat": 2, "n_warmup": 1, **options})
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernels[0], x)
        dist.all_reduce(y)
        fire()
        z = launch(kernels[1], x, torch.zeros_like(x))
        dist.all_reduce(z)
        return y + z

    return step, lambda: [best(kernel) for kernel in kernels]
