"""Steps whose arguments change their class from launch to launch, and a watch on what is compiled inside them. Fake driver."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from dist_tune import contextual_autotune
from dist_tune.replays.trials import Trials
from dist_tune.runtime import interception
from dist_tune.testing import FakeH200, Outcome
from tests.ranks.worlds import on_ranks

MS = {16: 12.0, 32: 3.0, 64: 9.0, 128: 12.0}
"""What a launch takes, by block."""


@triton.jit
def epoch_kernel(x_ptr, y_ptr, n, epoch, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + epoch, mask=at < n)


@triton.jit
def constant_kernel(x_ptr, y_ptr, n, step: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + step, mask=at < n)


@triton.heuristics({"EVEN": lambda args: args["epoch"] % args["BLOCK"] == 0})
@triton.jit
def heuristic_kernel(x_ptr, y_ptr, n, epoch, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + epoch + EVEN, mask=at < n)


class Seen:
    """Compilations inside the launches of a step."""

    def __init__(self) -> None:
        self.n_runs = 0
        self.lazy: list[tuple[int, bool]] = []
        """Run of the step, and True if the tuner times it, for each kernel that a launch compiles."""
        self.timed: list[int] = []
        """Runs of the step that the tuner times."""

        self.compiled: Counter[str] = Counter()
        """Class of the epoch -> kernels that this rank compiled and did not find on disk."""

    def listener(self, *, src: Any, cache_hit: bool, **facts: Any) -> None:
        """Triton's listener of compilations."""
        at = (src.fn.arg_names.index("epoch"),) if "epoch" in src.fn.arg_names else None
        if not cache_hit and at is not None:
            self.compiled["1" if at in src.constants else "16" if src.attrs.get(at) else "other"] += 1

    def run(self) -> None:
        """Called at the beginning of the step."""
        self.n_runs += 1
        if self.is_timed():
            self.timed.append(self.n_runs)

    def is_timed(self) -> bool:
        """True inside a replay that times something."""
        listener = interception.listeners.get(threading.get_ident())
        return isinstance(listener, Trials) and any(trial.is_timed for trial in listener._schedule.values())


def watch() -> Seen:
    """From here on, what is compiled inside launches of this process's main thread."""
    seen, compiled = Seen(), JITFunction._do_compile

    def do_compile(kernel: Any, *args: Any) -> Any:
        from triton.runtime import _async_compile

        if _async_compile.active_mode.get() is None:
            seen.lazy.append((seen.n_runs, seen.is_timed()))
        return compiled(kernel, *args)

    JITFunction._do_compile = do_compile
    FakeH200.launch_ms = launch_ms
    triton.knobs.compilation.listener = seen.listener
    return seen


def launch_ms(src: Any, metadata: Any) -> float:
    names = src.fn.arg_names
    return MS[int(src.constants[(names.index("BLOCK"),)])] if "BLOCK" in names else 0.0


def autotuned(kernel: Any = epoch_kernel, blocks: tuple[int, ...] = (16, 32, 64, 128), warps: tuple[int, ...] = (4,)) -> Any:
    """A fresh autotuned kernel."""
    configs = [triton.Config({"BLOCK": block}, num_warps=each) for block in blocks for each in warps]
    return triton.autotune(configs=configs, key=["n"])(kernel)


def tuned(step: Callable[[], object], seen: Seen, **options: Any) -> Any:
    """A step, tuned on all ranks."""

    def run() -> object:
        seen.run()
        return step()

    return contextual_autotune(**{"is_dist": True, "n_warmup": 1, "n_repeat": 2, "cache": False, **options})(run)


def counting(kernel: Any, seen: Seen, first: int = 1, **options: Any) -> Any:
    """A step with an epoch counter, a plain int."""
    x, y = torch.zeros(64), torch.zeros(64)
    epoch = first - 1

    def step() -> None:
        nonlocal epoch
        epoch += 1
        kernel[(1,)](x, y, 64, epoch)

    return tuned(step, seen, **options)


def on_fake(n: int, function: Any, *args: Any, **env: str) -> list[Outcome]:
    """Ranks with the fake driver."""
    return on_ranks(n, function, *args, mode="fake", env={"TRITON_DEFAULT_FP_FUSION": "1", **env})
