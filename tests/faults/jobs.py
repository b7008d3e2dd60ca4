"""All faults, what each is told as, and a step of two collectives in which one rank, or all, meet
one in one phase of the tuning.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, contextual_autotune
from dist_tune.replays.replayer import Conditions, Replayer
from dist_tune.tuning import compiling

Phase = Literal["discover", "compile", "race", "finals", "apply"]
Face = Literal["contextual", "function"]
PHASES: tuple[Phase, ...] = ("discover", "compile", "race", "finals", "apply")
BLOCKS = (16, 32, 64, 128)
VICTIM = 1
"""The rank that meets the fault, unless all do."""
DEADLINE_S = 4.0


class SkippedError(Exception):
    """Leaves the next collective out; the step goes on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, and what comes of it."""

    act: Callable[[], object]
    own: str
    """Error of the rank that meets it; empty: none, and the tuning ends well."""
    told: str
    """Error of the others."""
    words: str = ""
    """Pattern in the message on the others; in their log where there is no error."""
    is_of_config: bool = True
    """True: a config's launch meets it. False: the step's own code, between its collectives."""


def _raise(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def stop_for(seconds: float) -> None:
    """SIGSTOP for so long, as a debugger or a full swap does."""
    me = os.getpid()
    with subprocess.Popen(["/bin/sh", "-c", f"kill -STOP {me}; sleep {seconds}; kill -CONT {me}"]):
        pass


def _hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(3600)  # one C call, which keeps the interpreter lock


_ABSENT = "rank 1 last seen at: "
_LATE = "WARNING rank 1 is late"
FAULTS = {
    "nothing": Fault(lambda: None, "", ""),
    "raise error": Fault(
        _raise(ValueError("boom")),
        "ValueError",
        "PeerFailedError",
        "rank 1 .*ValueError: boom",
        False,
    ),
    "interrupt": Fault(
        _raise(KeyboardInterrupt()),
        "KeyboardInterrupt",
        "PeerFailedError",
        "rank 1 raised KeyboardInterrupt",
        False,
    ),
    "skip collective": Fault(
        _raise(SkippedError()),
        "PeerFailedError",
        "PeerFailedError",
        "rank 0 waited in vain.*rank 1 .*same collectives in the same order",
        False,
    ),
    "kill": Fault(
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "Died",
        "AbsentRanksError",
        f"^{_ABSENT}.*its process has ended",
    ),
    "leave": Fault(
        lambda: os._exit(3), "Died", "AbsentRanksError", f"^{_ABSENT}.*its process has ended"
    ),
    "no memory": Fault(_raise(MemoryError("no memory left")), "", ""),
    "sleep 3 s": Fault(lambda: time.sleep(3.0), "", "", _LATE),
    "stop 3 s": Fault(lambda: stop_for(3.0), "", "", _LATE),
    "sleep 5 s": Fault(
        lambda: time.sleep(5.0),
        "PeerFailedError",
        "PeerFailedError",
        "did not find all its ranks: .*64.*rank 1 .*64.*Leave out a config",
    ),
    "stop 10 s": Fault(
        lambda: stop_for(10.0),
        "AbsentRanksError",
        "AbsentRanksError",
        f"{_ABSENT}.*its process is stopped",
    ),
    "never return": Fault(
        lambda: time.sleep(1000.0), "Died", "StuckConfigError", "rank 1: .*candidate .*BLOCK="
    ),
    "hold the lock": Fault(_hold_the_lock, "Died", "AbsentRanksError", f"{_ABSENT}.*candidate"),
}
"""Late ranks are waited for below the deadline, which is four seconds."""


class Job:
    """The fault that waits in the step. Knows the phase by what the tuning calls."""

    def __init__(self, phase: Phase, fault: str) -> None:
        self.phase: Phase = "discover"
        self.has_met = False
        """True once the fault has happened; a race may leave one candidate, and no finals."""
        self._wanted, self._fault = phase, FAULTS[fault]

    def meet(self, *, is_of_config: bool) -> None:
        """The fault, once, in the phase that was asked for."""
        if (
            self.phase == self._wanted
            and not self.has_met
            and (is_of_config == self._fault.is_of_config or self.phase == "compile")
        ):
            self.has_met = True
            self._fault.act()

    def reduce(self, x: torch.Tensor) -> None:
        """The step's own code: an all-reduce."""
        try:
            self.meet(is_of_config=False)
            dist.all_reduce(x)
        except SkippedError:
            pass

    def watch(self) -> None:
        """Follow the phases of the tuning."""
        load_all, run_batch, last_run = compiling.load_all, Replayer.run_batch, Replayer.last_run
        job = self

        def loading(*args: Any, **kwargs: Any) -> Any:
            job.phase = "compile"
            job.meet(is_of_config=True)
            return load_all(*args, **kwargs)

        def batch(
            replayer: Replayer, closure: Any, replays: Any, conditions: Conditions, *note: Any
        ) -> None:
            job.phase = "finals" if conditions.phase == "finals" else "race"
            run_batch(replayer, closure, replays, conditions, *note)

        def last(replayer: Replayer, closure: Any) -> Any:
            job.phase = "apply"
            return last_run(replayer, closure)

        compiling.load_all, Replayer.run_batch, Replayer.last_run = loading, batch, last  # type: ignore[assignment, method-assign]


def run(
    rank: int, phase: Phase, fault: str, on_all: bool = False, face: Face = "contextual"
) -> dict[str, Any]:
    """Tune the step once, with the fault in it; what is left of it on this rank."""
    # Decorated for the interpreter, or not, by now.
    from tests.steps import autotuned, is_unpatched, launch

    job = Job(phase, fault if on_all or rank == VICTIM else "nothing")
    job.watch()
    runs: list[int] = []
    step: Any
    if face == "function":

        @autotune([{"BLOCK": block} for block in BLOCKS], None, n_repeat=2, n_warmup=1)
        def step(x: torch.Tensor, BLOCK: int) -> torch.Tensor:
            runs.append(BLOCK)
            if BLOCK == 64 or phase == "discover":
                job.meet(is_of_config=True)
            x = x + 1
            dist.all_reduce(x)
            x = x + 1
            job.reduce(x) if BLOCK == 64 or phase == "discover" else dist.all_reduce(x)
            return x

    else:
        configs = [
            triton.Config({"BLOCK": block}, pre_hook=lambda full: job.meet(is_of_config=True))
            for block in BLOCKS
        ]
        kernels = [autotuned(configs=configs) for _ in "ab"]

        @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)
        def step(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            for kernel in kernels:
                x = launch(kernel, x)
                job.reduce(x)
            return x

    y = step(torch.zeros(128))
    dist.barrier()
    return {
        "value": y[0].item(),
        "winners": [record.best.config for record in step.records],
        "n_runs": len(runs),
        "is_unpatched": is_unpatched(),
        "has_met": job.has_met,
    }
