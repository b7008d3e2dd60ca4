"""AllGather-GEMM as a tuner calls it and as it is called untuned, and how long calls of both take.

Knows how the step is decorated and what clocks there are; knows nothing of what is to be found out.
Figures of several ranks are those of the slowest.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from kernels.ag_gemm import AllGatherGemm, ag_gemm, config_space, random_operands  # before triton

import triton  # isort: skip
from triton.runtime import interpreter

from dist_tune import TuningRecord, autotune, contextual_autotune, prune_by_shared_memory
from kernels import harness
from kernels.operands import Shape, key_fn
from kernels.shard_gemm import ag_gemm_kernel

Call = Callable[[], object]


class ComparedStep:
    """AllGather-GEMM at one shape, tuned by `autotune` as a function or by `contextual_autotune`,
    and the same untuned. Collective.
    """

    def __init__(self, tuner: str, shape: Shape, device: torch.device) -> None:
        self.device = device
        self.a, self.b = random_operands(shape, torch.bfloat16, device)
        self.ctx = AllGatherGemm()
        self.ctx.gather_for(self.a)
        self.is_function = tuner == "function"
        self._tuned: Any = None
        self.decorate()

    def decorate(self) -> None:
        """Decorate it anew, so that the tuner has never seen it."""
        if self.is_function:
            self._tuned = autotune(
                config_space(), key_fn, prune_by_shared_memory, n_warmup=3, n_repeat=5
            )(ag_gemm.__wrapped__)
        else:
            self._tuned = contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5)(
                self.ctx.__call__
            )
        self.forget()

    def forget(self) -> None:
        """Make the next call one with a key that was not met before."""
        if self.is_function:
            inspect.getclosurevars(self._tuned).nonlocals["winners"].clear()
        else:
            ag_gemm_kernel.cache.clear()

    def tuned(self) -> object:
        """A call through the tuner."""
        return (
            self._tuned(self.a, self.b, self.ctx)
            if self.is_function
            else self._tuned(self.a, self.b)
        )

    def fixed(self, config: triton.Config) -> Call:
        """A call past the tuner, with this config."""
        if self.is_function:
            return lambda: ag_gemm.__wrapped__(self.a, self.b, self.ctx, config)
        return lambda: self.ctx(self.a, self.b, None, config)

    def untuned(self, config: triton.Config) -> Call:
        """A call as it would be without the tuner: for a closure, of a `triton.autotune` kernel
        that has its config by now.
        """
        return self.fixed(config) if self.is_function else lambda: self.ctx(self.a, self.b)

    @property
    def record(self) -> TuningRecord:
        """Of the last tuning or hit."""
        record: TuningRecord = self._tuned.records[-1]
        return record

    def ms(self, call: Call) -> float:
        """Milliseconds of one call on this rank, from when all ranks are ready until the device is
        through. Collective.
        """
        self.wait_for_all()
        began = time.perf_counter()
        call()
        self._wait_for_device()
        return (time.perf_counter() - began) * 1e3

    def step_ms(self, calls: dict[str, Call]) -> dict[str, float]:
        """The median of each call on its slowest rank, in turn: aligned, the host ahead; on CPUs by
        the clock. Collective.
        """
        if self.device.type == "cuda":
            return harness.aligned_ms(calls, 60)
        samples = [{name: self.ms(call) for name, call in calls.items()} for _ in range(5)]
        return {
            name: max(of_all_ranks(statistics.median(each[name] for each in samples)))
            for name in calls
        }

    def wait_for_all(self) -> None:
        """Until all ranks have come here, their devices idle. Collective."""
        self._wait_for_device()
        dist.barrier()

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def without_arithmetic(device: torch.device) -> Iterator[None]:
    """On CPUs kernels are launched and do nothing: the interpreter takes milliseconds, which differ
    by more than what is looked for.
    """
    if device.type == "cuda":
        yield
        return
    # New tensors are filled: a step that returns them returns the same each time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with patch.object(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: None):
        yield
    torch.use_deterministic_algorithms(False)


def of_all_ranks(value: Any) -> list[Any]:
    """The value of each rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def more_us(
    bare: Call, ours: Call, n_rounds: int, n_calls: int, rest: Call
) -> tuple[float, float, float]:
    """Microseconds of the host for a call of each, and how many more ours takes: medians over
    rounds; `rest` comes before both.
    """
    rounds = []
    for _ in range(n_rounds):
        us = []
        for call in (bare, ours):
            rest()
            began = time.perf_counter()
            for _ in range(n_calls):
                call()
            us.append((time.perf_counter() - began) / n_calls * 1e6)
        rounds.append((us[0], us[1], us[1] - us[0]))
    first, second, difference = (statistics.median(column) for column in zip(*rounds, strict=True))
    return first, second, difference
