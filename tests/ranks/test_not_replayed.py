"""Training steps and layers on two ranks: what must not be repeated is not tuned on any rank, and layers with their backward pass are."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dist_tune import contextual_autotune
from dist_tune.runtime import StoreWatch, noting_training
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"n_repeat": 1, "n_warmup": 0, "is_dist": True}


class _Doubled(torch.autograd.Function):
    kernel: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return launch(_Doubled.kernel, x.detach().float()).to(x.dtype) + x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        launch(_Doubled.kernel, grads[0].float())
        return 2 * grads[0]


class Layer(torch.nn.Module):
    """A linear layer, a kernel in the forward and in the backward pass, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.nn.functional.dropout(_Doubled.apply(self.linear(x)), 0.5)
        return y


def forward_and_backward(model: Any) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


def layer(rank: int) -> Any:
    model = DistributedDataParallel(Layer())
    return forward_and_backward(model), model


def accumulating(rank: int) -> Any:
    """Gradients are there before the first call."""
    model = DistributedDataParallel(Layer())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    return forward_and_backward(model), model


def in_buckets(rank: int) -> Any:
    """Gradients that are views of the buckets in which they are reduced."""
    model = DistributedDataParallel(Layer(), gradient_as_bucket_view=True)
    return forward_and_backward(model), model


def zeroed(rank: int) -> Any:
    """Gradients are there before the first call, and made anew in each."""
    model = DistributedDataParallel(Layer())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    step = forward_and_backward(model)

    def anew(x: torch.Tensor) -> Any:
        model.zero_grad()
        return step(x)

    return anew, model


def checkpointed(rank: int) -> Any:
    inner = Layer()
    model = DistributedDataParallel(inner)
    inner.forward, plain = lambda x: checkpoint(plain, x, use_reentrant=False), inner.forward  # type: ignore[method-assign]
    return forward_and_backward(model), model


def mixed_precision(rank: int) -> Any:
    model = DistributedDataParallel(Layer())
    step = forward_and_backward(model)

    def autocast(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(x)

    return autocast, model


def sharded(rank: int) -> Any:
    model = Layer()
    fully_shard(model)
    return forward_and_backward(model), model


TUNED = [layer, in_buckets, zeroed, checkpointed, mixed_precision, sharded]


def _trained(model: Any, optimizer: Any) -> Any:
    step = forward_and_backward(model)

    def train(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = step(x)
        optimizer.step()
        return loss

    return train, model


def trained(rank: int) -> Any:
    model = DistributedDataParallel(Layer())
    return _trained(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


def trained_sharded(rank: int) -> Any:
    model = Layer()
    fully_shard(model)
    return _trained(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def zero(rank: int) -> Any:
    model = DistributedDataParallel(Layer())
    return _trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))


def loaded(rank: int) -> Any:
    model = DistributedDataParallel(Layer())
    batches = iter(torch.utils.data.DataLoader(torch.rand(6, 64), batch_size=1))  # type: ignore[arg-type]
    step = forward_and_backward(model)
    return lambda x: step(x + next(batches)), model


def alone(rank: int) -> Any:
    """The second rank draws from a generator of its own."""
    model, draw = DistributedDataParallel(Layer()), random.Random(0).random if rank == 1 else random.random
    step = forward_and_backward(model)
    return lambda x: step(x * draw()), model


def counted_alone(rank: int) -> Any:
    """The second rank adds to a tensor that it has captured, as only another run shows."""
    model, total = DistributedDataParallel(Layer()), torch.zeros(())
    step = forward_and_backward(model)

    def counted(x: torch.Tensor) -> Any:
        loss = step(x)
        if rank == 1:
            total.data.add_(1)
        return loss + total

    return counted, model


NOT_TUNED = [accumulating, trained, trained_sharded, zero, loaded, alone, counted_alone]


def _outcome(rank: int, make: Any, is_tuned: bool) -> Any:
    _Doubled.kernel = autotuned(blocks=(16, 32) if is_tuned else (16,))
    torch.manual_seed(rank)
    random.seed(rank)
    step, model = make(rank)
    step = contextual_autotune(**QUICK)(step) if is_tuned else step
    xs = [torch.full((4, 64), float(i + rank)) for i in range(1, 4)]
    torch.manual_seed(5)
    losses = [step(x).item() for x in xs]
    local = [getattr(each, "to_local", lambda each=each: each)() for p in model.parameters() for each in (p, p.grad) if each is not None]
    dist.barrier()
    return (losses, [each.detach().tolist() for each in local], torch.rand(1).item()), len(step.records) if is_tuned else 0


def _both(rank: int, name: str) -> Any:
    make = globals()[name]
    expected, _ = _outcome(rank, make, is_tuned=False)
    found, n_records = _outcome(rank, make, is_tuned=True)
    return found == expected, n_records


@pytest.mark.parametrize("name", [each.__name__ for each in TUNED])
def test_a_layer_with_its_backward_pass_is_tuned_in_its_first_call(name: str):
    """Values, gradients and random numbers are those of plain calls, to the bit."""
    assert values(on_ranks(2, _both, name)) == [(True, 1)] * 2


@pytest.mark.parametrize("name", [each.__name__ for each in NOT_TUNED])
def test_a_step_that_must_not_be_repeated_is_not_tuned_on_any_rank(name: str):
    """Values, parameters and gradients are those of plain calls, to the bit; one line says why, with the rank."""
    outcomes = on_ranks(2, _both, name)
    assert values(outcomes) == [(True, 0)] * 2
    for each in outcomes:
        line = next(line for line in each.log.splitlines() if ": not tuned; split it, or give reset=" in line)
        assert ("on rank 1" in line) if "alone" in name else ("on rank 0" in line)


def _raises_alone(rank: int) -> Any:
    _Doubled.kernel = autotuned(blocks=(16, 32))
    runs = []

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> float:
        runs.append(1)
        y = launch(_Doubled.kernel, x)
        if rank == 1 and len(runs) == 2:
            raise IndexError("past the end")
        dist.all_reduce(y)
        return y[0].item()

    return step(torch.zeros(64)), len(step.records)


def test_an_error_of_the_second_run_on_one_rank_is_a_no_of_all():
    """Its peer waits in a collective until the deadline; the first run is the call's on both."""
    outcomes = on_ranks(2, _raises_alone)
    assert values(outcomes) == [(2.0, 0)] * 2
    assert all("when it runs again" in each.log for each in outcomes)


def _later(rank: int) -> Any:
    """Two threads make first calls at once."""
    before = [vars(cls)["run"] for cls in (InterpretedFunction, JITFunction)], vars(torch.optim.lr_scheduler.LRScheduler)["step"]
    barrier = threading.Barrier(2)

    def call() -> None:
        kernel = autotuned(blocks=(16, 32))

        def step(x: torch.Tensor) -> torch.Tensor:
            barrier.wait(5)
            y = launch(kernel, x)
            barrier.wait(5)
            return y

        with noting_training(), StoreWatch().first_run():
            step(torch.zeros(64))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    after = [vars(cls)["run"] for cls in (InterpretedFunction, JITFunction)], vars(torch.optim.lr_scheduler.LRScheduler)["step"]
    return before == after


def test_threads_that_listen_at_once_leave_nothing_patched():
    """The last one to leave puts Triton's and torch's own functions back."""
    assert values(on_ranks(1, _later, is_dist=False)) == [True]
