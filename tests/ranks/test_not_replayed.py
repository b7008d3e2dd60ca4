"""Training steps and layers on two ranks: what must not be repeated is not tuned on any rank, and layers with their backward pass are."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dist_tune import contextual_autotune
from dist_tune.runtime import noting_tensors, noting_training
from tests.steps import autotuned, launch
from tests.tuning.steps import QUICK, Case, New, beside_plain
from tests.worlds import further, log, on_each_rank


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Any) -> torch.Tensor:
        ctx.kernel = kernel
        return launch(kernel, x.detach().float()).to(x.dtype) + x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        launch(ctx.kernel, grads[0].float())
        return 2 * grads[0], None


class Layer(torch.nn.Module):
    """A linear layer, a kernel in the forward and in the backward pass, and dropout."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kernel = torch.nn.Linear(64, 64), kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.nn.functional.dropout(_Doubled.apply(self.linear(x), self.kernel), 0.5)
        return y


Step = Callable[[torch.Tensor], Any]


def sharded(layer: Layer) -> Layer:
    fully_shard(layer)
    return layer


def checkpointed(layer: Layer) -> Any:
    plain = layer.forward
    layer.forward = lambda x: checkpoint(plain, x, use_reentrant=False)  # type: ignore[method-assign]
    return DistributedDataParallel(layer)


def the_pass(model: Any, both: Step) -> Step:
    return both


def accumulating(model: Any, both: Step) -> Step:
    """Gradients are there before the first call."""
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    return both


def zeroed(model: Any, both: Step) -> Step:
    accumulating(model, both)
    return lambda x: (model.zero_grad(), both(x))[1]


def autocast(model: Any, both: Step) -> Step:
    step: Step = torch.autocast("cpu", dtype=torch.bfloat16)(both)
    return step


def trained(model: Any, both: Step, make: Callable[..., Any]) -> Step:
    optimizer = make(model.parameters(), lr=0.01)
    return lambda x: (optimizer.zero_grad(), both(x), optimizer.step())[1]


def loaded(model: Any, both: Step) -> Step:
    batches = iter(torch.utils.data.DataLoader(torch.rand(6, 64), batch_size=1))  # type: ignore[arg-type]
    return lambda x: both(x + next(batches))


def drawn_alone(model: Any, both: Step) -> Step:
    """The second rank draws from a generator of its own."""
    random.seed(dist.get_rank())
    draw = random.Random(0).random if dist.get_rank() == 1 else random.random
    return lambda x: both(x * draw())


def counted_alone(model: Any, both: Step) -> Step:
    """The second rank adds to a tensor that it has captured, as only another run shows."""
    total, rank = torch.zeros(()), dist.get_rank()

    def counted(x: torch.Tensor) -> Any:
        loss = both(x)
        if rank == 1:
            total.data.add_(1)
        return loss + total

    return counted


DDP = DistributedDataParallel
TUNED: dict[str, Any] = {
    "layer": (DDP, the_pass),
    "gradients that are views of buckets": (partial(DDP, gradient_as_bucket_view=True), the_pass),
    "zeroed": (DDP, zeroed),
    "checkpointed": (checkpointed, the_pass),
    "mixed precision": (DDP, autocast),
    "sharded": (sharded, the_pass),
}
NOT_TUNED: dict[str, Any] = {
    "accumulating": (DDP, accumulating),
    "trained": (DDP, partial(trained, make=partial(AdamW, fused=True))),
    "trained sharded": (sharded, partial(trained, make=AdamW)),
    "ZeRO": (DDP, partial(trained, make=partial(ZeroRedundancyOptimizer, optimizer_class=AdamW))),
    "loaded": (DDP, loaded),
    "drawn alone": (DDP, drawn_alone),
    "counted alone": (DDP, counted_alone),
}


FURTHER = ("gradients that are views of buckets", "mixed precision", "trained sharded", "ZeRO")


def cases(table: dict[str, Any]) -> list[Any]:
    return [further(name) if name in FURTHER else name for name in table]


def case_of(new: New, wrap: Callable[[Layer], Any], prepare: Callable[[Any, Step], Step]) -> Case:
    model = wrap(Layer(new()))

    def both(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def after() -> Any:
        local = (
            getattr(each, "to_local", lambda each=each: each)() for p in model.parameters() for each in (p, p.grad) if each is not None
        )
        return [each.detach().clone() for each in local]

    step = prepare(model, both)
    torch.manual_seed(5)
    return step, [(torch.full((4, 64), float(i + dist.get_rank())),) for i in range(1, 4)], after


@on_each_rank(cases=cases(TUNED))
def test_a_layer_with_its_backward_pass_is_tuned_in_its_first_call(rank: int, case: str):
    """Values, gradients and random numbers are those of plain calls, to the bit."""
    assert beside_plain(lambda new: case_of(new, *TUNED[case])) == [(True, True)] * 2


@on_each_rank(cases=cases(NOT_TUNED))
def test_a_step_that_must_not_be_repeated_is_not_replayed_on_any_rank(rank: int, case: str):
    """Values, parameters and gradients are those of plain calls, to the bit; one line says why, with the rank."""
    assert beside_plain(lambda new: case_of(new, *NOT_TUNED[case])) == [(True, False)] * 2
    lines = [line for line in log().splitlines() if ": tuned in the calls to come, which take at most 5% longer" in line]
    assert len(lines) >= 2
    assert all(("on rank 1" if "alone" in case else "on rank 0") in line for line in lines)


@on_each_rank(is_alone=True)
def test_an_error_of_the_second_run_on_one_rank_is_a_no_of_all(rank: int):
    """Its peer waits in a collective until the deadline; the first run is the call's on both, and the first cause is told."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "1"
    kernel, runs = autotuned(blocks=(16, 32)), []

    @contextual_autotune(is_dist=True, **QUICK)
    def step(x: torch.Tensor) -> float:
        runs.append(1)
        y = launch(kernel, x)
        if rank == 1 and len(runs) == 2:
            raise IndexError("past the end")
        dist.all_reduce(y)
        return y[0].item()

    assert (step(torch.zeros(64)), len(step.records)) == (2.0, 0)
    assert (
        "step raises IndexError when it runs again (past the end): tuned in the calls to come, which take at most 5% longer (on rank 1)"
        in log()
    )


@on_each_rank()
def test_threads_that_listen_at_once_leave_nothing_patched(rank: int):
    """Two threads make first calls at once; the last one to leave puts Triton's own functions back, and takes torch's hook away."""

    def patched() -> Any:
        return [vars(cls)["run"] for cls in (InterpretedFunction, JITFunction)], dict(_global_optimizer_pre_hooks)

    before, barrier = patched(), threading.Barrier(2)

    def call() -> None:
        with noting_training(), noting_tensors(lambda *_: None):
            barrier.wait(5)
            launch(autotuned(blocks=(16,)), torch.zeros(64))
            barrier.wait(5)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert patched() == before
