"""Training loops on two ranks that are tuned while they run: all that they train is the untuned loop's to the bit, and the winner wins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from dist_tune import contextual_autotune
from tests.ranks.online_steps import run_job
from tests.ranks.test_not_replayed import Layer
from tests.steps import autotuned
from tests.worlds import further, log, on_each_rank

BLOCKS = (16, 64, 128)
"""Of 128 elements: under the interpreter each program takes its time, so that the last one is the fastest by far."""
Loss = Callable[[torch.Tensor], torch.Tensor]
Job = tuple[Callable[[int], Any], torch.optim.Optimizer]
"""A step, called with its number; and its optimizer."""


def stepping(model: Any, loss: Loss, make: Callable[..., Any], *, has_schedule: bool = False) -> Job:
    optimizer = make(model.parameters(), lr=0.01)
    schedule = CosineAnnealingLR(optimizer, 100) if has_schedule else None

    def step(k: int) -> Any:
        optimizer.zero_grad()
        value = loss(torch.full((2, 64), 1.0 + k % 3 + dist.get_rank()))
        value.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return value.detach()

    return step, optimizer


def scaled(model: Any, loss: Loss) -> Job:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5), SGD(model.parameters(), lr=0.01)

    def step(k: int) -> Any:
        optimizer.zero_grad()
        value = loss(torch.full((2, 64), 1.0 + k % 3))
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value.detach(), scaler.get_scale()

    return step, optimizer


def loaded(model: Any, loss: Loss) -> Job:
    def batches() -> Any:
        while True:
            yield from DataLoader(torch.rand(6, 2, 64), batch_size=None, shuffle=True)  # type: ignore[arg-type]

    data, optimizer = batches(), AdamW(model.parameters(), lr=0.01, fused=True)

    def step(k: int) -> Any:
        optimizer.zero_grad()
        value = loss(next(data))
        value.backward()
        optimizer.step()
        return value.detach()

    return step, optimizer


def accumulating(model: Any, loss: Loss) -> Job:
    optimizer = AdamW(model.parameters(), lr=0.01)

    def step(k: int) -> Any:
        value = loss(torch.full((2, 64), 1.0 + k % 3))
        value.backward()
        if k % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return value.detach()

    return step, optimizer


def closing(model: Any, loss: Loss) -> Job:
    optimizer = LBFGS(model.parameters(), lr=0.01, max_iter=2)

    def step(k: int) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(torch.full((2, 64), 1.0 + k % 3))
            value.backward()
            return value

        return optimizer.step(closure).detach()

    return step, optimizer


def sharded(layer: Layer) -> Layer:
    fully_shard(layer)
    return layer


DDP = DistributedDataParallel
JOBS: dict[str, Any] = {
    "fused AdamW and a schedule": (DDP, partial(stepping, make=partial(AdamW, fused=True), has_schedule=True)),
    "GradScaler": (DDP, scaled),
    "ZeRO": (DDP, partial(stepping, make=partial(ZeroRedundancyOptimizer, optimizer_class=AdamW))),
    "DataLoader": (DDP, loaded),
    "LBFGS": (DDP, closing),
    "FSDP2": (sharded, partial(stepping, make=AdamW)),
    "accumulation": (DDP, accumulating),
}


QUICK = ("fused AdamW and a schedule", "FSDP2", "accumulation")


def job(case: str, n_calls: int = 0) -> tuple[list[Any], list[torch.Tensor], Any]:
    """Losses; parameters, gradients, what the optimizer holds, and the next random number; the kernel.

    Tuned to the end, or untuned for ``n_calls``.
    """
    wrap, make = JOBS[case]
    kernel = autotuned(blocks=BLOCKS if not n_calls else BLOCKS[:1])
    torch.manual_seed(5)
    model = wrap(Layer(kernel))
    step, optimizer = make(model, lambda x: model(x).square().mean())
    torch.manual_seed(7)
    tuned = step if n_calls else contextual_autotune(is_dist=True, max_slowdown=1.0)(step)
    losses = [step(k) for k in range(n_calls)] if n_calls else run_job(tuned)
    kept = [
        value
        for each in getattr(optimizer, "optim", optimizer).state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]
    assert kept or "Grad" in case
    held = [*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None), *kept]
    local = [getattr(each, "to_local", lambda each=each: each)().detach().clone() for each in held]
    return losses, [*local, torch.rand(1)], kernel


@on_each_rank(cases=[*QUICK, *(further(case) for case in JOBS if case not in QUICK)])
def test_a_training_loop_is_tuned_while_it_runs(rank: int, case: str):
    """Dropout draws in each step, and each key of the kernel, forward and backward, has the fastest config at the end."""
    losses, state, kernel = job(case)
    plain_losses, plain_state, _ = job(case, len(losses))
    assert losses == plain_losses
    assert len(state) == len(plain_state)
    assert all(map(torch.equal, state, plain_state))
    assert {config.kwargs["BLOCK"] for config in kernel.cache.values()} == {BLOCKS[-1]}
    assert "is not tuned any further" not in log()
