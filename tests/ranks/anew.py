"""Steps whose config 2 hangs on rank 1 before its collective, and a factory that makes their group anew."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.measure.clocks import WallSpan
from dist_tune.watch import watchdog
from tests.ranks.kernels import autotuned, best, launch
from tests.ranks.stuck import BLOCKS, hang, threads_left

launched: list[int] = []
"""Candidates in the order of their launches in this process."""


def kernel_that_hangs(rank: int, how: str, at_launch: int, is_best: bool) -> Any:
    """Config 2 hangs on rank 1 at its n-th launch; ``is_best``: it is the fastest."""

    def hook_of(own: int) -> Any:
        def hook(full: dict[str, Any]) -> None:
            launched.append(own)
            if is_best and own != 2:
                time.sleep(0.02)
            if rank == 1 and own == 2 and launched.count(own) == at_launch:
                hang(how)

        return hook

    return autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook_of(i)) for i, block in enumerate(BLOCKS)])


def goes_on(
    rank: int, how: str, at_launch: int, in_place: bool, options: dict[str, Any], is_best: bool = False, device: str = "cpu"
) -> Any:
    """Tune a step that talks on a group of its own, made anew once the old one is dead."""
    kernel, made = kernel_that_hangs(rank, how, at_launch, is_best), [0]

    def make() -> Any:
        made[0] += 1
        group = dist.new_group()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = launch(kernel, x)
            dist.all_reduce(y, group=group)
            if in_place:
                x += 1
            return y

        return step, group

    function, group = make()
    step = contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0, search="exhaustive", group=group, make=make, **options)(function)
    x = torch.zeros(64, device=device)
    y = step(x)
    n_in_tuning = len(launched)
    again = step(torch.ones(64, device=device))
    failures = [each.failure for each in step.records[0].candidates]
    tail = launched[n_in_tuning:]
    return made[0], y[0].item(), x[0].item(), again[0].item(), best(kernel), failures, launched[:n_in_tuning], tail, threads_left()


def factory_fails(rank: int) -> Any:
    """The factory raises on rank 1, while rank 0 waits for it in its own."""
    kernel, groups = kernel_that_hangs(rank, "loop", 2, False), [dist.new_group()]

    def make() -> Any:
        if rank == 1:
            raise ValueError("no groups left")
        groups.append(dist.new_group())
        return step, groups[-1]

    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y, group=groups[-1])
        return y

    contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0, search="exhaustive", group=groups[0], make=make)(step)(torch.zeros(64))


def device_waits(rank: int) -> Any:
    """The device stands still after config 2's first launch, until process groups are aborted."""
    state, is_done = {"n_aborted": 0}, WallSpan.is_done

    def abort() -> None:
        state["n_aborted"] += 1

    patch = pytest.MonkeyPatch()
    patch.setattr(watchdog, "abort_groups", abort)
    patch.setattr(WallSpan, "is_done", lambda span: is_done(span) and (2 not in launched or state["n_aborted"] > 0))
    return state, *goes_on(rank, "never", 0, False, {})


def hangs_between_launches(rank: int) -> Any:
    """Two kernels of three configs; rank 1 hangs after both where the first one ran with 32."""
    ran: dict[str, int] = {}

    def kernel(name: str) -> Any:
        def hook_of(block: int) -> Any:
            return lambda full: ran.update({name: block})

        return autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook_of(block)) for block in (16, 32, 64)])

    first, second, made = kernel("first"), kernel("second"), [0]

    def make() -> Any:
        made[0] += 1
        group = dist.new_group()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = launch(second, launch(first, x)[:48])
            if rank == 1 and ran["first"] == 32:
                hang("loop")
            dist.all_reduce(y, group=group)
            return y

        return step, group

    function, group = make()
    step = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0, search="exhaustive", group=group, make=make)(function)
    y = step(torch.zeros(64))
    return made[0], y[0].item(), [[each.failure is None for each in record.candidates] for record in step.records]
