"""A step of two kernels with a collective after each, in which one rank, or all, meet a fault in one phase of the tuning."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.replays.replays import Conditions, Replayer
from dist_tune.tuning import compilation

Phase = Literal["discover", "compile", "race", "finals", "apply"]
PHASES: tuple[Phase, ...] = ("discover", "compile", "race", "finals", "apply")
BLOCKS = (16, 32, 64, 128)
VICTIM = 1
"""The rank that meets the fault, unless all do."""


class Job:
    """The step, and the fault that waits in it. Knows the phase by what the tuning calls."""

    def __init__(self, rank: int, phase: Phase, fault: Callable[[Job], None]) -> None:
        self.phase: Phase = "discover"
        self.skips = False
        """True: the step leaves its next collective out."""
        self._rank = rank
        self._wanted = phase
        self._fault = fault
        self.has_met = False
        """True once the fault has happened; a race may leave one candidate, and no finals."""

    def meet(self, *, in_config: bool) -> None:
        """The fault, once, in the phase that was asked for: in a config's hook, or in the step's own code."""
        if self.phase == self._wanted and not self.has_met and in_config == (self._fault in OF_CONFIGS or self.phase == "compile"):
            self.has_met = True
            self._fault(self)

    def watch(self) -> None:
        """Follow the phases of the tuning."""
        load_all, run_batch, last_run = compilation.load_all, Replayer.run_batch, Replayer.last_run
        job = self

        def loading(*args: Any, **kwargs: Any) -> Any:
            job.phase = "compile"
            job.meet(in_config=True)
            return load_all(*args, **kwargs)

        def batch(replayer: Replayer, closure: Any, replays: Any, conditions: Conditions, *note: Any) -> None:
            job.phase = "race" if conditions.is_race else "finals"
            run_batch(replayer, closure, replays, conditions, *note)

        def last(replayer: Replayer, closure: Any) -> Any:
            job.phase = "apply"
            return last_run(replayer, closure)

        compilation.load_all, Replayer.run_batch, Replayer.last_run = loading, batch, last  # type: ignore[assignment, method-assign]


# -- faults ----------------------------------------------------------------------------------------------------------


def nothing(job: Job) -> None:
    """No fault."""


def raise_error(job: Job) -> None:
    """An exception of the step's own code."""
    raise ValueError("the user's own mistake")


def kill(job: Job) -> None:
    """SIGKILL, as from the kernel when memory has run out."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave(job: Job) -> None:
    """The end of the process without a word."""
    os._exit(3)


def interrupt(job: Job) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def no_memory(job: Job) -> None:
    """The host has no memory left, for a moment."""
    raise MemoryError("no memory left")


def sleep_3_s(job: Job) -> None:
    """Late, but there: below the deadline."""
    time.sleep(3.0)


def stop_3_s(job: Job) -> None:
    """SIGSTOP for three seconds, as a debugger or a full swap does."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(3.0)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def never_return(job: Job) -> None:
    """A loop that gives way to other threads."""
    while True:
        time.sleep(0.05)


def hold_the_lock(job: Job) -> None:
    """A loop inside one C call, which keeps the interpreter lock."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def skip_collective(job: Job) -> None:
    """The next collective of the step is left out on this rank."""
    job.skips = True


FAULTS: dict[str, Callable[[Job], None]] = {
    each.__name__: each
    for each in (
        nothing, raise_error, kill, leave, interrupt, no_memory, sleep_3_s, stop_3_s, never_return, hold_the_lock, skip_collective
    )
}  # fmt: skip
OF_CONFIGS = {kill, leave, no_memory, sleep_3_s, stop_3_s, never_return, hold_the_lock}
"""Those that a config's launch meets, and not the step's own code."""


# -- the step --------------------------------------------------------------------------------------------------------


def run(rank: int, phase: Phase, fault: str, on_all: bool = False) -> dict[str, Any]:
    """Tune the step once, with the fault in it; what is left of it on this rank."""
    from tests.ranks.kernels import autotuned, best, is_unpatched, launch  # decorated for the interpreter, or not, by now

    job = Job(rank, phase, FAULTS[fault] if on_all or rank == VICTIM else nothing)
    job.watch()

    def hook(full: dict[str, Any]) -> None:
        job.meet(in_config=True)

    kernels = [autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in BLOCKS]) for _ in "ab"]

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        for kernel in kernels:
            x = launch(kernel, x)
            job.meet(in_config=False)
            if job.skips:
                job.skips = False
            else:
                dist.all_reduce(x)
        return x

    runs: list[int] = []
    y = step(torch.zeros(128))
    dist.barrier()
    records = step.records
    return {
        "value": y[0].item(),
        "winners": [best(kernel) for kernel in kernels],
        "failures": [each.failure for record in records for each in record.candidates],
        "n_runs": len(runs),
        "is_unpatched": is_unpatched(),
        "has_met": job.has_met,
    }
