"""Steps of all kinds, and what one tuner or the other makes of them beside plain calls."""

from __future__ import annotations

import queue
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, contextual_autotune
from tests.steps import accumulate_kernel, add_kernel, atomic_kernel, autotuned, launch

Case = tuple[Callable[..., Any], Iterable[tuple[Any, ...]], Callable[[], Any]]
"""The step, the arguments of each call, and the state after all."""
QUICK: Any = {"n_repeat": 1, "n_warmup": 1}
FACES: dict[str, Callable[[Any], Any]] = {
    "contextual": lambda step: contextual_autotune(is_dist=dist.is_initialized(), **QUICK)(step),
    "function": lambda step: autotune([{"part": k} for k in range(2)], None, **QUICK)(lambda *args, part: step(*args)),
}


class New(NamedTuple):
    """Makes autotuned kernels, of one config but for the tuner of kernels."""

    face: str

    def __call__(self, kernel: Any = add_kernel, blocks: tuple[int, ...] = (16, 32), **options: Any) -> Any:
        return autotuned(kernel, blocks if self.face == "contextual" else blocks[:1], **options)


def beside_plain(make: Callable[[New], Case], faces: Iterable[str] = FACES) -> list[tuple[bool, bool]]:
    """For each tuner, whether calls give and leave what plain ones do, to the bit, with the next random number; and whether it tunes."""
    expected, _ = _called(make, "")
    return [(found == expected, is_tuned) for found, is_tuned in (_called(make, face) for face in faces)]


def _called(make: Callable[[New], Case], face: str) -> Any:
    torch.manual_seed(7)
    step, calls, after = make(New(face))
    tuned = FACES[face](step) if face else step
    found = [_bytes(tuned(*args)) for args in calls]
    return (found, _bytes(after()), torch.rand(1).item()), bool(getattr(tuned, "records", ()))


def _bytes(value: Any) -> Any:
    """Tensors and arrays as their bytes and shapes, in any container."""
    if isinstance(value, torch.Tensor):
        return (
            tuple(value.shape),
            value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            _bytes(value.grad) if value.is_leaf else None,
        )
    if isinstance(value, dict):
        return {str(key): _bytes(each) for key, each in value.items() if key != "params"}
    if isinstance(value, FunctionType):
        return _bytes(value())
    if isinstance(value, list | tuple | deque):
        return [_bytes(each) for each in value]
    if isinstance(value, torch.nn.Module):
        return _bytes([*value.parameters(), *value.buffers()])
    for take in ("state_dict", "getstate", "tobytes", "get_state"):
        if hasattr(value, take):
            return _bytes(getattr(value, take)())
    if isinstance(value, InTurn):
        return _bytes(value.parts), value.n
    if isinstance(value, queue.Queue | Held | np.random.Generator):
        return _bytes(
            value.queue if isinstance(value, queue.Queue) else value.random() if isinstance(value, np.random.Generator) else value.all()
        )
    if isinstance(value, torch.utils.data.DataLoader):
        return "whose order is drawn from torch's generator"
    return _bytes([*value]) if hasattr(value, "__next__") else value


# -- steps that must not be made twice -------------------------------------------------------------------------------

plain_accumulate = triton.jit(accumulate_kernel.fn)
_hidden: list[torch.Tensor] = []
_scheduled: list[Any] = []


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((64,), value)


def zeros() -> torch.Tensor:
    return torch.zeros(64)


def add_to(total: torch.Tensor, y: torch.Tensor) -> None:
    plain_accumulate[(4,)](y, total, 64, BLOCK=16)


def _into_hidden(y: torch.Tensor) -> None:
    add_to(_hidden[0], y)


@dataclass(slots=True)
class Held:
    """As a cache of keys and values: a part of it is the step's value."""

    rows: torch.Tensor
    n: int = 0

    def keep(self, y: torch.Tensor) -> torch.Tensor:
        self.rows[self.n] = y
        self.n += 1
        return self.rows[: self.n].sum(0)

    def all(self) -> Any:
        return self.rows, self.n


def weight() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(ones(0.5))
    parameter.grad = zeros()
    return parameter


def training(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, ...]:
    model = torch.nn.Linear(64, 1)
    return model, make(model.parameters())


def train(y: torch.Tensor, state: Any, update: Callable[..., object] | None = None) -> float:
    """Forward and backward pass, and the update of the parameters."""
    model, optimizer, *_ = state
    optimizer.zero_grad()
    loss = model(y).square().mean()
    if update is None:
        loss.backward()
        optimizer.step()
    else:
        update(loss)
    return float(loss.item())


def small_step(y: torch.Tensor, state: Any) -> float:
    """Parameters move by less than comparisons with a tolerance see, by an optimizer that torch knows nothing of."""

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        state[0].weight.data.sub_(state[0].weight.grad, alpha=1e-6)

    return train(y, state, update)


def scaled(y: torch.Tensor, state: Any) -> float:
    *_, optimizer, scaler = state
    return train(y, state, lambda loss: (scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()))


def lbfgs(y: torch.Tensor, state: Any) -> float:
    def closure() -> Any:
        state[1].zero_grad()
        loss = state[0](y).square().mean()
        loss.backward()
        return loss

    return train(y, state, lambda loss: state[1].step(closure))


def every_fourth_time(y: torch.Tensor, state: Any) -> float:
    """The optimizer steps in none of the first runs."""
    model, optimizer, n = state
    loss = model(y).square().mean()
    loss.backward()
    n[0] += 1
    if n[0] % 4 == 0:
        optimizer.step()
    return float(loss.item())


def sgd() -> tuple[Any, ...]:
    return training(lambda each: torch.optim.SGD(each, lr=0.1))


def graph() -> list[torch.Tensor]:
    leaf = torch.ones(64, requires_grad=True)
    return [leaf * 1, leaf]


def differentiated(y: torch.Tensor, state: Any) -> torch.Tensor:
    """What the value's graph has saved was changed by the probe and put back: autograd sees the state that it has saved."""
    state[0].add_(y)
    loss: torch.Tensor = (state[0] * state[1]).sum()
    loss.backward()
    return loss


def normed(y: torch.Tensor, norm: torch.nn.BatchNorm1d) -> torch.Tensor:
    loss: torch.Tensor = (norm(torch.arange(256.0).view(4, 64)) * y).square().sum()
    loss.backward()
    return loss.detach()


def counted_by_none(y: torch.Tensor, norm: torch.nn.BatchNorm1d) -> torch.Tensor:
    """Torch counts no writes to the statistics, and no module counts batches."""
    return torch.nn.functional.batch_norm(y.expand(4, 64), norm.running_mean, norm.running_var, training=True)


def counted(n: list[int]) -> int:
    n[0] += 1
    return n[0]


def queued() -> queue.Queue[torch.Tensor]:
    batches: queue.Queue[torch.Tensor] = queue.Queue()
    for i in range(5):
        batches.put(ones(i))
    return batches


@dataclass
class InTurn:
    """Two buffers, which runs write to in turn."""

    parts: list[torch.Tensor]
    n: int = 0

    def add(self, y: torch.Tensor) -> None:
        add_to(self.parts[self.n % 2], y)
        self.n += 1


def in_turn() -> list[Any]:
    parts = [zeros(), zeros()]
    return [*parts, InTurn(parts)]


def hidden() -> Callable[[], torch.Tensor]:
    """Memory that nothing leads to but the launch itself, and what shows it."""
    _hidden[:] = [zeros()]
    return lambda: globals()["_" + "hidden"][0].clone()


def scheduled() -> Callable[[], torch.Tensor]:
    """A scheduler that nothing leads to but its call."""
    _scheduled[:] = [torch.optim.lr_scheduler.StepLR(sgd()[1], 1, gamma=0.5)]
    return lambda: torch.tensor(globals()["_" + "scheduled"][0].get_last_lr())


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor, Any], Any]]] = {
    "fused AdamW": (lambda: training(lambda each: torch.optim.AdamW(each, lr=0.01, fused=True)), train),
    "no optimizer of torch": (sgd, small_step),
    "scaler": (lambda: (*sgd(), torch.amp.GradScaler("cpu", growth_interval=2)), scaled),
    "LBFGS": (lambda: training(lambda each: torch.optim.LBFGS(each, max_iter=3)), lbfgs),
    "every fourth call": (lambda: (*sgd(), [0]), every_fourth_time),
    "scheduler alone": (lambda: torch.optim.lr_scheduler.StepLR(sgd()[1], 1, gamma=0.5), lambda y, its: its.step()),
    "scheduler that nothing leads to": (scheduled, lambda y, its: globals()["_" + "scheduled"][0].step()),
    "moving average": (zeros, lambda y, its: its.data.mul_(0.9).add_(y) is None),
    "a kernel into a gradient": (weight, lambda y, its: add_to(its.grad, y)),
    "a kernel into hidden memory": (hidden, lambda y, its: globals()["_into_" + "hidden"](y)),
    "cache of keys and values": (lambda: Held(torch.zeros(4, 64)), lambda y, its: its.keep(y)),
    "numpy array": (lambda: np.zeros(64), lambda y, its: its.__iadd__(y.numpy()) is None),
    "resized": (lambda: torch.ones(4), lambda y, its: its.resize_(its.numel() + 1).fill_(1) is None),
    "exchanged": (ones, lambda y, its: setattr(its, "data", its + y)),  # the probe would double it in memory that nothing leads to
    "added by torch": (zeros, lambda y, its: its.add_(y)),
    "added by a kernel": (zeros, lambda y, its: add_to(its, y)),
    "in turn": (in_turn, lambda y, its: its[-1].add(y)),  # the first run has not touched what the probe changes
    "added with out=": (zeros, lambda y, its: torch.add(its, y, out=its)),
    "in place in the graph": (graph, lambda y, its: its[0].mul_(y) is None),
    "in place before the graph": (lambda: [zeros(), torch.ones(64, requires_grad=True)], differentiated),
    "buffer": (lambda: torch.nn.BatchNorm1d(64), lambda y, its: setattr(its, "running_mean", 0.9 * its.running_mean + y)),
    "batch norm": (lambda: torch.nn.BatchNorm1d(64), normed),
    "batch norm as a function": (lambda: torch.nn.BatchNorm1d(64), counted_by_none),
    "deque": (lambda: deque([zeros()]), lambda y, its: its[0].add_(y) is None),
    "grown list": (list, lambda y, its: (its.append(y), its)[1]),
    "counter": (lambda: [0], lambda y, its: y + counted(its)),
    "next batch": (lambda: iter([ones(i) for i in range(5)]), lambda y, its: y + next(its)),
    "data loader": (lambda: torch.utils.data.DataLoader(torch.arange(4.0), batch_size=None, shuffle=True), lambda y, its: y + sum(its)),  # type: ignore[arg-type]
    "queue": (queued, lambda y, its: y + its.get(timeout=5)),
    "Python's generator": (lambda: random.Random(0), lambda y, its: y * its.random()),
    "numpy's generator": (lambda: np.random.default_rng(0), lambda y, its: y * float(its.random())),
    "torch's generator": (lambda: torch.Generator().manual_seed(0), lambda y, its: y * torch.rand(1, generator=its)),
}  # fmt: skip
"""Name -> state, and what the step does with it and the output of its kernel; its value is that, or the output."""


def changing(new: New, name: str) -> Case:
    """The state is an argument of the step, or captured. The second miss of some is in a call whose signature is not new."""
    is_argument = new.face == "contextual"
    kernel, (make, change) = new(), CHANGES[name]
    state = make()

    def step(x: torch.Tensor, given: Any = None) -> Any:
        y = launch(kernel, x)
        value = change(y, given) if is_argument else change(y, state)
        return y if value is None else value

    def calls() -> Any:
        for k in range(3):
            yield ones(k + 1.0), *([state] * is_argument)
            if k == 0 and name.startswith("added"):
                kernel.cache.clear()

    return step, calls(), lambda: (state[0].sum().backward(), state)[1] if name == "in place in the graph" else state


def crowded(new: New) -> Case:
    """Kernels are given many tensors before memory that nothing leads to but a launch; it keeps what it holds."""
    total, kernel, parts = hidden(), new(), [ones() for _ in range(4)]

    def step(x: torch.Tensor) -> torch.Tensor:
        for part in parts:
            launch(kernel, part)
        globals()["_into_" + "hidden"](zeros())
        return launch(kernel, x)

    return step, [(ones(),)] * 3, lambda: total


# -- kernels that restore or zero what they change -------------------------------------------------------------------


def beside(new: New, kind: str) -> Case:
    """A kernel that adds stands before and behind another one, for whose sake the step is replayed."""
    option: Any = {"reset_to_zero" if kind == "zeroed" else "restore_value": ["y_ptr"]}
    total, other, y = new(accumulate_kernel, blocks=(32,) if kind == "one config" else (16, 32), **option), new(), zeros()
    if kind == "cache":
        contextual_autotune(**QUICK)(lambda x, y: launch(total, x, y))(ones(), zeros())
        total.cache.clear()
    for each in [total] * (kind in ("known", "zeroed", "late")) + [other] * (kind == "late"):
        each.cache[64, "torch.float32", "torch.float32"] = each.configs[0]

    def step(x: torch.Tensor) -> torch.Tensor:
        launch(total, x, y)
        out = launch(other, zeros())
        launch(total, x, y)
        return out

    def calls() -> Any:
        yield (ones(),)
        if kind == "late":  # the miss is not the first launch, and the signature not new
            other.cache.clear()
            yield (ones(),)

    return step, calls(), lambda: y


def zeroed_twice(new: New) -> Case:
    """Triton zeroes while it tunes, at the first launch; the second one adds."""
    total, y = new(accumulate_kernel, reset_to_zero=["y_ptr"]), zeros()
    return lambda x, y: len([launch(total, x, y) for _ in range(2)]), [(ones(), y)], lambda: y


def common_generators(new: New) -> Case:
    """Each run draws the same, and the last one what a plain call would."""
    random.seed(3)
    np.random.seed(3)
    kernel, draw = new(), lambda: random.random() + float(np.random.rand()) + torch.rand(1).item()
    return lambda x: torch.nn.functional.dropout(launch(kernel, x)) + draw(), [(ones(),)] * 3, draw


def atomics(new: New, order: str, *, is_argument: bool) -> Case:
    """Launches that are restored (r), of one config (s) and of several (t) add into one output."""
    kernels = {"r": new(atomic_kernel, restore_value=["y_ptr"]), "s": new(atomic_kernel, blocks=(32,)), "t": new(atomic_kernel)}
    total = torch.zeros(1)

    def step(x: torch.Tensor, y: torch.Tensor = total) -> float:
        for name in order:
            launch(kernels[name], x, y)
        return y.item()

    return step, [(ones(), *[total] * is_argument)] * 3, lambda: total


def inference(new: New, where: str, *, has_option: bool) -> Case:
    """An argument that a kernel adds to, whatever is an inference tensor."""
    total, other = new(accumulate_kernel, restore_value=["y_ptr"]), new()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if has_option:
            launch(total, x, y)
        else:
            add_to(y, x)
        return launch(other, y)

    with torch.inference_mode(mode=where == "arguments"):
        x, y = ones(), zeros()
    return torch.inference_mode()(step) if where == "inside" else step, [(x, y)] * 2, lambda: y
