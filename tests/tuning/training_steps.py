"""Steps that must not be made twice: each makes its objects, and returns the step, the arguments of its calls and what is compared."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from tests.ranks.kernels import accumulate_kernel, add_kernel, launch

Case = tuple[Callable[..., Any], list[tuple[Any, ...]], Callable[[], Any]]
"""The step, the arguments of each call, and the state after all."""
plain_add, plain_accumulate = triton.jit(add_kernel.fn), triton.jit(accumulate_kernel.fn)


class Layer(torch.nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.rand(64))
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.weight * launch(self.kernel, x)).square().mean()
        return loss


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()
    return state["state"], [{name: value for name, value in group.items() if name != "params"} for group in state["param_groups"]]


def _step_of(model: Layer, update: Callable[[], object]) -> Callable[[torch.Tensor], float]:
    """Forward and backward pass, and the update of the parameters."""

    def step(x: torch.Tensor) -> float:
        model.zero_grad()
        loss = model(x)
        loss.backward()
        update()
        return float(loss.item())

    return step


def _trained(kernel: Any, make: Callable[[Any], torch.optim.Optimizer], wrap: Callable[[Any], Any] = lambda each: each) -> Case:
    model = Layer(kernel)
    optimizer = make(model.parameters())
    return _step_of(model, wrap(optimizer).step), [(torch.ones(64) * i,) for i in range(1, 4)], lambda: (model.weight, state_of(optimizer))


def fused_adamw(kernel: Any) -> Case:
    return _trained(kernel, lambda each: torch.optim.AdamW(each, lr=0.01, fused=True))


def small_steps(kernel: Any) -> Case:
    """Parameters that move by less than comparisons with a tolerance see, by an optimizer that torch knows nothing of."""
    model = Layer(kernel)

    def update() -> None:
        assert model.weight.grad is not None
        model.weight.data.sub_(model.weight.grad, alpha=1e-6)

    return _step_of(model, update), [(torch.ones(64),)] * 3, lambda: model.weight


class DuckOptimizer:
    def __init__(self, params: Any) -> None:
        self.params, self.moments, self.n_steps = list(params), [], 0
        self.moments = [torch.zeros_like(each) for each in self.params]

    def step(self) -> None:
        self.n_steps += 1
        for each, moment in zip(self.params, self.moments, strict=True):
            moment.mul_(0.9).add_(each.grad)
            each.data.sub_(moment, alpha=0.1 / self.n_steps)


def no_optimizer_of_torch(kernel: Any) -> Case:
    model = Layer(kernel)
    optimizer = DuckOptimizer(model.parameters())
    return _step_of(model, optimizer.step), [(torch.ones(64),)] * 3, lambda: (model.weight, optimizer.moments, optimizer.n_steps)


def scaler(kernel: Any) -> Case:
    model = Layer(kernel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x)
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        return float(loss.item())

    return step, [(torch.ones(64),)] * 3, lambda: (model.weight, grad_scaler.state_dict())


def lbfgs(kernel: Any) -> Case:
    model = Layer(kernel)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(x: torch.Tensor) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x)
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    return step, [(torch.ones(64),)] * 3, lambda: (model.weight, state_of(optimizer))


def _rated(kernel: Any, change: Callable[[torch.optim.Optimizer, Any], None], make: Callable[[Any], Any] = lambda each: None) -> Case:
    model = Layer(kernel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = make(optimizer)

    def step(x: torch.Tensor) -> float:
        value = launch(kernel, x)[0].item()
        change(optimizer, scheduler)
        return float(value)

    return step, [(torch.ones(64),)] * 3, lambda: (state_of(optimizer)[1], scheduler and scheduler.state_dict()["last_epoch"])


def scheduler_alone(kernel: Any) -> Case:
    return _rated(kernel, lambda _, each: each.step(), lambda each: torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5))


def kernel_into_gradient(kernel: Any) -> Case:
    weight = torch.nn.Parameter(torch.ones(64))
    weight.grad = torch.zeros(64)

    def step(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        plain_accumulate[(4,)](y, weight.grad, 64, BLOCK=16)
        return y

    return step, [(weight, torch.ones(64))] * 3, lambda: weight.grad


_hidden = [torch.zeros(64)]


def _into_hidden(y: torch.Tensor) -> None:
    plain_accumulate[(4,)](y, _hidden[0], 64, BLOCK=16)


def kernel_into_hidden_memory(kernel: Any) -> Case:
    """Memory that nothing leads to but the launch itself."""
    _hidden[0] = torch.zeros(64)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        globals()["_into_" + "hidden"](y)
        return y

    return step, [(torch.ones(64),)] * 3, lambda: _hidden[0]


@dataclass(slots=True)
class Slots:
    total: torch.Tensor
    n: int = 0


def slots(kernel: Any) -> Case:
    state, c = Slots(torch.zeros(64)), torch.zeros(64)

    def step(state: Slots, c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.total += launch(kernel, x)
        state.n += 1
        c += state.total
        return c

    return step, [(state, c, torch.ones(64))] * 3, lambda: (state.total, state.n, c)


def numpy_array(kernel: Any) -> Case:
    total = np.zeros(64)

    def step(total: np.ndarray[Any, Any], x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        total += y.numpy()
        return y

    return step, [(total, torch.ones(64))] * 3, lambda: torch.from_numpy(total)


def next_batch(kernel: Any) -> Case:
    loader = iter([torch.full((64,), float(i)) for i in range(4)])

    def step() -> torch.Tensor:
        return launch(kernel, next(loader))

    return step, [()] * 3, lambda: [each[0].item() for each in loader]


def data_loader(kernel: Any) -> Case:
    torch.manual_seed(3)
    loader = torch.utils.data.DataLoader(torch.arange(4.0).repeat_interleave(64).view(4, 64), batch_size=None, shuffle=True)  # type: ignore[arg-type,var-annotated]

    def step() -> torch.Tensor:
        return sum((launch(kernel, batch) for batch in loader), torch.zeros(64))

    return step, [()] * 2, lambda: torch.rand(1)


def private_random(kernel: Any) -> Case:
    mine, numpys, torchs = random.Random(0), np.random.default_rng(0), torch.Generator().manual_seed(0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x) * mine.random() + float(numpys.random()) + torch.rand(1, generator=torchs)

    return step, [(torch.ones(64),)] * 3, lambda: (mine.random(), float(numpys.random()), torch.rand(1, generator=torchs))


def resized(kernel: Any) -> Case:
    t = torch.ones(4)

    def step(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        n = t.numel()
        t.resize_(n + 1)
        t[n] = n
        return launch(kernel, x)

    return step, [(t, torch.ones(64))] * 3, lambda: t


class Cache:
    def __init__(self) -> None:
        self.keys, self.position = torch.zeros(4, 64), 0


def exchanged(kernel: Any) -> Case:
    """The probe would double it again, in memory that nothing leads back to."""
    t = torch.ones(64)

    def step(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        t.data = t + y
        return y

    return step, [(t, torch.ones(64))] * 3, lambda: t


def key_value_cache(kernel: Any) -> Case:
    cache = Cache()

    def step(x: torch.Tensor) -> torch.Tensor:
        cache.keys[cache.position] = launch(kernel, x)
        cache.position += 1
        return cache.keys[: cache.position].sum(0)

    return step, [(torch.full((64,), float(i)),) for i in range(3)], lambda: (cache.keys, cache.position)


def accumulated(kernel: Any) -> Case:
    total = torch.zeros(64)

    def step(x: torch.Tensor) -> None:
        total.add_(launch(kernel, x))

    return step, [(torch.ones(64),)] * 3, lambda: total


def nonlocal_counter(kernel: Any) -> Case:
    n = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        return launch(kernel, x) + n

    return step, [(torch.ones(64),)] * 3, lambda: n


def moving_average(kernel: Any) -> Case:
    model, average = Layer(kernel), Layer(kernel)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        for each, other in zip(average.parameters(), model.parameters(), strict=True):
            each.data.mul_(0.999).add_(other.data, alpha=0.001 * float(loss.detach()))
        value: torch.Tensor = loss.detach()
        return value

    return step, [(torch.ones(64),)] * 3, lambda: average.weight


def in_place_in_the_graph(kernel: Any) -> Case:
    leaf = torch.ones(64, requires_grad=True)
    x = leaf * 1

    def step(x: torch.Tensor) -> None:
        x.mul_(launch(kernel, torch.ones(64)))

    def after() -> Any:
        x.sum().backward()
        return leaf.grad

    return step, [(x,)] * 2, after


def every_fourth_call(kernel: Any) -> Case:
    """The optimizer steps in none of the first runs."""
    model, n = Layer(kernel), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> float:
        nonlocal n
        loss = model(x)
        loss.backward()
        n += 1
        if n % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.item())

    return step, [(torch.ones(64),)] * 3, lambda: (model.weight, model.weight.grad, n)


def reassigned_buffer(kernel: Any) -> Case:
    model: Any = Layer(kernel)
    model.register_buffer("average", torch.zeros(64))

    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        model.average = 0.9 * model.average + y
        return y

    return step, [(torch.ones(64),)] * 3, lambda: model.average


def queued(kernel: Any) -> Case:
    batches: queue.Queue[torch.Tensor] = queue.Queue()
    for i in range(4):
        batches.put(torch.full((64,), float(i)))
    return lambda: launch(kernel, batches.get(timeout=5)), [()] * 3, lambda: batches.get(timeout=5)


CASES = [
    fused_adamw, small_steps, no_optimizer_of_torch, scaler, lbfgs, scheduler_alone, kernel_into_gradient, kernel_into_hidden_memory,
    slots, numpy_array, next_batch, data_loader, private_random, resized, exchanged, key_value_cache, accumulated, nonlocal_counter,
    moving_average, in_place_in_the_graph, every_fourth_call, reassigned_buffer, queued,
]  # fmt: skip
