"""Replayed steps: what is replayed, what must not be, and what is put back; memory, rests, graphs.

Calls are those of plain steps.
"""

from __future__ import annotations

import gc
import os
import queue
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction

from dist_tune import autotune, contextual_autotune
from dist_tune.ranks import group_of
from dist_tune.replays import replayer
from dist_tune.testing import ExactTime
from dist_tune.tuning import tuning
from tests.steps import (
    BLOCKS,
    Layer,
    accumulate_kernel,
    add_kernel,
    atomic_kernel,
    autotuned,
    configs,
    failures,
    is_unpatched,
    launch,
    named,
    run_job,
)
from tests.worlds import further, log, on_each_rank

Case = tuple[Callable[..., Any], Iterable[tuple[Any, ...]], Callable[[], Any]]
"""The step, the arguments of each call, and the state after all."""
QUICK: Any = {"n_repeat": 1, "n_warmup": 1}
FACES: dict[str, Callable[[Any], Any]] = {
    "contextual": lambda step: contextual_autotune(is_dist=dist.is_initialized(), **QUICK)(step),
    "function": lambda step: autotune([{"part": k} for k in range(2)], None, **QUICK)(
        lambda *args, part: step(*args)
    ),
}
ONLINE = ": tuned in the calls to come, which take at most 5% longer"


def made(
    face: str, kernel: Any = add_kernel, blocks: tuple[int, ...] = (16, 32), **options: Any
) -> Any:
    """An autotuned kernel, of one config but for the tuner of kernels."""
    return autotuned(kernel, blocks if face == "contextual" else blocks[:1], **options)


def beside_plain(case: Callable[[str], Case]) -> list[tuple[bool, bool]]:
    """For each tuner, whether calls give and leave what plain ones do, to the bit, with the next
    random number; and whether it tunes.
    """
    expected, _ = called(case, "")
    return [
        (found == expected, is_tuned) for found, is_tuned in (called(case, face) for face in FACES)
    ]


def called(case: Callable[[str], Case], face: str) -> Any:
    torch.manual_seed(7)
    step, calls, after = case(face)
    tuned = FACES[face](step) if face else step
    found = [plain(tuned(*args)) for args in calls]
    return (found, plain(after()), torch.rand(1).item()), bool(getattr(tuned, "records", ()))


def plain(value: Any) -> Any:
    """Tensors and arrays as their bytes and shapes, in any container."""
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return tuple(value.shape), content, plain(value.grad) if value.is_leaf else None
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items() if key != "params"}
    if isinstance(value, FunctionType):
        return plain(value())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, torch.nn.Module):
        return plain([*value.parameters(), *value.buffers()])
    for take in ("state_dict", "getstate", "tobytes", "get_state"):
        if hasattr(value, take):
            return plain(getattr(value, take)())
    if isinstance(value, InTurn | Held):
        return plain(
            [*vars(value).values()] if isinstance(value, InTurn) else [value.rows, value.n]
        )
    if isinstance(value, queue.Queue | np.random.Generator):
        return plain([*value.queue] if isinstance(value, queue.Queue) else value.random())
    if isinstance(value, torch.utils.data.DataLoader):
        return "whose order is drawn from torch's generator"
    return plain([*value]) if hasattr(value, "__next__") else value


# -- what is replayed ------------------------------------------------------------------------------

plain_accumulate = triton.jit(accumulate_kernel.fn)
_hidden: list[Any] = []


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((64,), value)


def zeros() -> torch.Tensor:
    return torch.zeros(64)


def add_to(total: torch.Tensor, y: torch.Tensor) -> None:
    plain_accumulate[(4,)](y, total, 64, BLOCK=16)


def beside(face: str, kind: str) -> Case:
    """A kernel that adds stands before and behind another one, for whose sake the step is
    replayed.
    """
    option: Any = {"reset_to_zero" if kind == "zeroed" else "restore_value": ["y_ptr"]}
    blocks = (32,) if kind == "one config" else (16, 32)
    total, other, y = made(face, accumulate_kernel, blocks, **option), made(face), zeros()
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


def zeroed_twice(face: str) -> Case:
    """Triton zeroes while it tunes, at the first launch; the second one adds."""
    total, y = made(face, accumulate_kernel, reset_to_zero=["y_ptr"]), zeros()
    return lambda x, y: len([launch(total, x, y) for _ in range(2)]), [(ones(), y)], lambda: y


def common_generators(face: str) -> Case:
    """Each run draws the same, and the last one what a plain call would."""
    random.seed(3)
    np.random.seed(3)
    kernel, draw = (
        made(face),
        lambda: random.random() + float(np.random.rand()) + torch.rand(1).item(),
    )
    return lambda x: torch.nn.functional.dropout(launch(kernel, x)) + draw(), [(ones(),)] * 3, draw


REPEATED = [
    common_generators,
    zeroed_twice,
    *(
        pytest.param(partial(beside, kind=kind), id=kind)
        for kind in ("one config", "known", "zeroed", "cache")
    ),
]


@on_each_rank(1, cases=REPEATED, is_dist=False)
def test_a_step_that_may_be_repeated_is_replayed(rank: int, case: Any):
    """Generators of torch, Python and numpy, and what kernels restore or zero, also those with a
    known config, are put back.
    """
    assert beside_plain(case) == [(True, True)] * 2


def atomics(face: str, order: str, *, is_argument: bool) -> Case:
    """Launches that are restored (r), of one config (s) and of several (t) add into one output."""
    kernels = {
        "r": made(face, atomic_kernel, restore_value=["y_ptr"]),
        "s": made(face, atomic_kernel, (32,)),
        "t": made(face, atomic_kernel),
    }
    total = torch.zeros(1)

    def step(x: torch.Tensor, y: torch.Tensor = total) -> float:
        for name in order:
            launch(kernels[name], x, y)
        return y.item()

    return step, [(ones(), *[total] * is_argument)] * 3, lambda: total


@on_each_rank(1, cases=["rt", "srsr", "tsrtr"], is_dist=False)
def test_atomics_of_several_kernels_into_one_tensor_add_once(rank: int, case: str):
    """The tensor is an argument of the step, or a default of it."""
    for is_argument in (True, False):
        found = beside_plain(partial(atomics, order=case, is_argument=is_argument))
        assert all(is_plain for is_plain, _ in found), (is_argument, found)


def inference(face: str, where: str, *, has_option: bool) -> Case:
    """An argument that a kernel adds to, whatever is an inference tensor."""
    total, other = made(face, accumulate_kernel, restore_value=["y_ptr"]), made(face)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if has_option:
            launch(total, x, y)
        else:
            add_to(y, x)
        return launch(other, y)

    with torch.inference_mode(mode=where == "arguments"):
        x, y = ones(), zeros()
    return torch.inference_mode()(step) if where == "inside" else step, [(x, y)] * 2, lambda: y


@on_each_rank(1, cases=["around", "inside", "arguments"], is_dist=False)
def test_inference_mode_changes_nothing(rank: int, case: str):
    """An argument that a kernel adds to, with restore_value or without, holds what one run leaves;
    so where the miss comes late.
    """
    with torch.inference_mode(mode=case == "around"):
        for make in (
            *(partial(inference, where=case, has_option=has) for has in (True, False)),
            partial(beside, kind="late"),
        ):
            assert [is_plain for is_plain, _ in beside_plain(make)] == [True] * 2, make


@on_each_rank(
    1,
    cases=["a step with reset", "a function with reset", "a function with a check"],
    is_dist=False,
)
def test_memory_under_restore_value_changes_once_where_any_run_may_follow(rank: int, case: str):
    """No probe is made, and the first run does not count either."""
    kernel, total = autotuned(accumulate_kernel, restore_value=["y_ptr"]), zeros()

    def step(x: torch.Tensor, part: int = 0) -> torch.Tensor:
        launch(kernel, x, total)
        return x.clone()

    options: Any = {"check": torch.clone} if case.endswith("check") else {"reset": lambda: None}
    face = (
        contextual_autotune
        if case.startswith("a step")
        else partial(autotune, [{"part": k} for k in range(2)], None)
    )
    tuned: Any = face(**options, **QUICK)(step)
    tuned(ones())
    assert len(tuned.records) > 0
    assert total.tolist() == [1.0] * 64


class Owner:
    """A part of a program, with all that objects hold."""

    __slots__ = ("array", "inner", "kernel", "log", "n", "parts")

    def __init__(self) -> None:
        self.kernel, self.array, self.parts, self.n, self.log = (
            autotuned(),
            np.zeros(2),
            {"rows": [zeros()]},
            0,
            [zeros(), zeros()],
        )
        self.inner: Any = torch.nn.Linear(1, 1)
        self.inner.total = zeros()  # no buffer

    def step(self, x: torch.Tensor) -> None:
        y = launch(self.kernel, x)
        self.array += 1
        self.n += 1
        for total in (self.parts["rows"][0], self.log[1], self.inner.total):
            total.add_(y)


@on_each_rank(1, is_dist=False)
def test_what_plain_objects_hold_is_repeated_and_told_once(rank: int):
    """In attributes, slots, lists in dicts and arrays: the step's own business, and it is
    replayed.
    """
    step = contextual_autotune(**QUICK)(Owner().step)
    step(ones())
    assert len(step.records) == 1
    (line,) = [each for each in log().splitlines() if "each replay does so again" in each]
    for name in (
        "self.array",
        "self.n",
        "self.parts['rows'][0]",
        "self.log[1]",
        "self.inner.total",
    ):
        assert name in line


# -- what must not be ------------------------------------------------------------------------------


def _into_hidden(y: torch.Tensor) -> None:
    add_to(_hidden[0], y)


def hidden(n: int = 64) -> Callable[[], torch.Tensor]:
    """Memory that nothing leads to but the launch itself, and what shows it."""
    _hidden[:] = [torch.empty(n)]  # pages that are not touched take no memory
    _hidden[0][:64] = 0.0
    return lambda: globals()["_" + "hidden"][0][:64].clone()


def scheduled() -> Callable[[], torch.Tensor]:
    """A scheduler that nothing leads to but its call."""
    _hidden[:] = [torch.optim.lr_scheduler.StepLR(sgd()[1], 1, gamma=0.5)]
    return lambda: torch.tensor(globals()["_" + "hidden"][0].get_last_lr())


@dataclass(slots=True)
class Held:
    """As a cache of keys and values: a part of it is the step's value."""

    rows: torch.Tensor
    n: int = 0

    def keep(self, y: torch.Tensor) -> torch.Tensor:
        self.rows[self.n] = y
        self.n += 1
        return self.rows[: self.n].sum(0)


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


def weight() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(ones(0.5))
    parameter.grad = zeros()
    return parameter


def training(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, ...]:
    model = torch.nn.Linear(64, 1)
    return model, make(model.parameters())


def sgd() -> tuple[Any, ...]:
    return training(lambda each: torch.optim.SGD(each, lr=0.1))


def train(
    y: torch.Tensor, state: Any, update: Callable[[torch.Tensor], object] | None = None
) -> float:
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
    """Parameters move by less than comparisons with a tolerance see, by an optimizer that torch
    knows nothing of.
    """

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        state[0].weight.data.sub_(state[0].weight.grad, alpha=1e-6)

    return train(y, state, update)


def scaled(y: torch.Tensor, state: Any) -> float:
    *_, optimizer, scaler = state
    return train(
        y,
        state,
        lambda loss: (scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()),
    )


def every_fourth_time(y: torch.Tensor, state: Any) -> float:
    """The optimizer steps in none of the first runs."""
    model, optimizer, n = state
    loss = model(y).square().mean()
    loss.backward()
    if counted(n) % 4 == 0:
        optimizer.step()
    return float(loss.item())


def graph() -> list[torch.Tensor]:
    leaf = torch.ones(64, requires_grad=True)
    return [leaf * 1, leaf]


def differentiated(y: torch.Tensor, state: Any) -> torch.Tensor:
    """What the value's graph has saved was changed by the probe and put back: autograd sees the
    state that it has saved.
    """
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
    return torch.nn.functional.batch_norm(
        y.expand(4, 64), norm.running_mean, norm.running_var, training=True
    )


def counted(n: list[int]) -> int:
    n[0] += 1
    return n[0]


def queued() -> queue.Queue[torch.Tensor]:
    batches: queue.Queue[torch.Tensor] = queue.Queue()
    for i in range(5):
        batches.put(ones(i))
    return batches


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor, Any], Any]]] = {
    "fused AdamW": (
        lambda: training(lambda each: torch.optim.AdamW(each, lr=0.01, fused=True)),
        train,
    ),
    "no optimizer of torch": (sgd, small_step),
    "scaler": (lambda: (*sgd(), torch.amp.GradScaler("cpu", growth_interval=2)), scaled),
    "every fourth call": (lambda: (*sgd(), [0]), every_fourth_time),
    "scheduler that nothing leads to": (
        scheduled,
        lambda y, its: globals()["_" + "hidden"][0].step(),
    ),
    "moving average": (zeros, lambda y, its: its.data.mul_(0.9).add_(y) is None),
    "a kernel into a gradient": (weight, lambda y, its: add_to(its.grad, y)),
    "a kernel into hidden memory": (hidden, lambda y, its: globals()["_into_" + "hidden"](y)),
    "cache of keys and values": (lambda: Held(torch.zeros(4, 64)), lambda y, its: its.keep(y)),
    "numpy array": (lambda: np.zeros(64), lambda y, its: its.__iadd__(y.numpy()) is None),
    "resized": (
        lambda: torch.ones(4),
        lambda y, its: its.resize_(its.numel() + 1).fill_(1) is None,
    ),
    # The probe would double it in memory that nothing leads to
    "exchanged": (ones, lambda y, its: setattr(its, "data", its + y)),
    "added by a kernel": (zeros, lambda y, its: add_to(its, y)),
    # The first run has not touched what the probe changes
    "in turn": (in_turn, lambda y, its: its[-1].add(y)),
    "added with out=": (zeros, lambda y, its: torch.add(its, y, out=its)),
    "in place in the graph": (graph, lambda y, its: its[0].mul_(y) is None),
    "in place before the graph": (
        lambda: [zeros(), torch.ones(64, requires_grad=True)],
        differentiated,
    ),
    "buffer": (
        lambda: torch.nn.BatchNorm1d(64),
        lambda y, its: setattr(its, "running_mean", 0.9 * its.running_mean + y),
    ),
    "batch norm": (lambda: torch.nn.BatchNorm1d(64), normed),
    "batch norm as a function": (lambda: torch.nn.BatchNorm1d(64), counted_by_none),
    "grown list": (list, lambda y, its: (its.append(y), its)[1]),
    "counter": (lambda: [0], lambda y, its: y + counted(its)),
    "next batch": (lambda: iter([ones(i) for i in range(5)]), lambda y, its: y + next(its)),
    "data loader": (
        lambda: torch.utils.data.DataLoader(torch.arange(4.0), batch_size=None, shuffle=True),  # type: ignore[arg-type]
        lambda y, its: y + sum(its),
    ),
    "queue": (queued, lambda y, its: y + its.get(timeout=5)),
    "Python's generator": (lambda: random.Random(0), lambda y, its: y * its.random()),
    "numpy's generator": (lambda: np.random.default_rng(0), lambda y, its: y * float(its.random())),
    "torch's generator": (
        lambda: torch.Generator().manual_seed(0),
        lambda y, its: y * torch.rand(1, generator=its),
    ),
}
"""Name -> state, and what the step does with it and the output of its kernel; its value is that, or
the output.
"""


def changing(face: str, name: str) -> Case:
    """The state is an argument of the step, or captured.

    The second miss of some is in a call whose signature is not new.
    """
    is_argument = face == "contextual"
    kernel, (make, change) = made(face), CHANGES[name]
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

    return (
        step,
        calls(),
        lambda: (state[0].sum().backward(), state)[1] if name == "in place in the graph" else state,
    )


@on_each_rank(1, cases=list(CHANGES), is_dist=False)
def test_a_step_that_must_not_be_repeated_is_not_replayed(rank: int, case: str):
    """It gives or leaves something else when it is made again; one line of the log says so, and
    what.
    """
    assert beside_plain(partial(changing, name=case)) == [(True, False)] * 2
    assert log().count(ONLINE) >= 2
    if case == "grown list":  # not told as a change of a tensor in place
        assert (
            "returns another value when it runs again (returned a list of length 2, expected a list"
            " of length 1)" in log()
        )


def too_large(face: str) -> Case:
    """A kernel writes to memory that nothing leads to but a launch: more than 2 GiB, most of which
    is never touched.
    """
    total, kernel = hidden((1 << 29) + 64), made(face)

    def step(x: torch.Tensor) -> torch.Tensor:
        globals()["_into_" + "hidden"](zeros())
        return launch(kernel, x)

    return step, [(ones(),)] * 3, total


@on_each_rank(1, is_dist=False)
def test_memory_that_cannot_be_copied_may_be_changed(rank: int):
    """What leads to no other name than a kernel's argument is looked at by its copy: without room
    for one the step is not replayed.
    """
    assert beside_plain(too_large) == [(True, False)] * 2
    assert (
        log().count(
            "may change y_ptr of accumulate_kernel, of which no copy can be made: tuned in the"
            " calls to come"
        )
        == 2
    )


@on_each_rank(1, is_dist=False)
def test_threads_in_first_runs_at_once_leave_nothing_patched(rank: int):
    """The last one to leave puts Triton's own functions back, and takes torch's hook away."""

    def patched() -> Any:
        return vars(InterpretedFunction)["run"], dict(_global_optimizer_pre_hooks), is_unpatched()

    before, barrier = patched(), threading.Barrier(2)

    def call() -> None:
        kernel, runs = autotuned(), list[int]()

        def step(x: torch.Tensor) -> torch.Tensor:
            runs.append(len(runs))
            if runs == [0]:
                barrier.wait(30)
            return launch(kernel, x)

        contextual_autotune(**QUICK)(step)(zeros())

    threads = [threading.Thread(target=call) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (patched(), barrier.broken) == (before, False)


# -- on two ranks ----------------------------------------------------------------------------------

Step = Callable[[torch.Tensor], Any]


def checkpointed(layer: Layer) -> Any:
    own = layer.forward
    layer.forward = lambda x: checkpoint(own, x, use_reentrant=False)  # type: ignore[method-assign]
    return DistributedDataParallel(layer)


def as_it_is(model: Any, both: Step) -> Step:
    return both


def with_gradients(model: Any, both: Step) -> Step:
    """Gradients are there before the first call."""
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    return both


def zeroed(model: Any, both: Step) -> Step:
    with_gradients(model, both)
    return lambda x: (model.zero_grad(), both(x))[1]


def autocast(model: Any, both: Step) -> Step:
    step: Step = torch.autocast("cpu", dtype=torch.bfloat16)(both)
    return step


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
LAYERS: dict[str, Any] = {
    "as it is": (DDP, as_it_is, ""),
    "zeroed": (DDP, zeroed, ""),
    "checkpointed": (checkpointed, as_it_is, ""),
    "sharded": (fully_shard, as_it_is, ""),
    "gradients that are views of buckets": (
        partial(DDP, gradient_as_bucket_view=True),
        as_it_is,
        "",
    ),
    "mixed precision": (DDP, autocast, ""),
    "accumulating": (DDP, with_gradients, "on rank 0"),
    "drawn alone": (DDP, drawn_alone, "on rank 1"),
    "counted alone": (DDP, counted_alone, "on rank 1"),
}
"""Name -> wrapper, step of the model and its forward and backward pass, and where it may not be
repeated.
"""
FURTHER = ("gradients that are views of buckets", "mixed precision")


def layer(face: str, name: str) -> Case:
    wrap, prepare, _ = LAYERS[name]
    model = wrap(Layer(made(face)))

    def both(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def after() -> Any:
        held = (each for p in model.parameters() for each in (p, p.grad) if each is not None)
        return [
            getattr(each, "to_local", lambda each=each: each)().detach().clone() for each in held
        ]

    step = prepare(model, both)
    torch.manual_seed(5)
    return step, [(torch.full((4, 64), float(i + dist.get_rank())),) for i in range(1, 4)], after


@on_each_rank(cases=[further(name) if name in FURTHER else name for name in LAYERS])
def test_a_layer_with_its_backward_pass_is_replayed_unless_one_rank_may_not(rank: int, case: str):
    """Values, parameters, gradients and random numbers are those of plain calls; one rank's no is a
    no of all, told with the rank.
    """
    *_, where = LAYERS[case]
    assert beside_plain(partial(layer, name=case)) == [(True, not where)] * 2
    told = [line for line in log().splitlines() if ONLINE in line]
    assert bool(told) == bool(where)
    assert all(where in line for line in told)


@on_each_rank(is_alone=True)
def test_an_error_of_the_second_run_on_one_rank_is_a_no_of_all(rank: int):
    """Its peer waits in a collective until the deadline; the first run is the call's on both, and
    the first cause is told.
    """
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

    assert (step(zeros()), len(step.records)) == (2.0, 0)
    assert f"step raises IndexError when it runs again (past the end){ONLINE} (on rank 1)" in log()


@on_each_rank()
def test_harm_on_one_rank_drops_a_config_on_all(rank: int):
    """Each rank undoes what happened there, and says so at the vote."""

    @autotune(BLOCKS, None, check=lambda x: x + 1, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        result = x + 1
        if rank == 1 and block < 4:
            x.numpy()[:] = 5.0  # as a kernel writes: torch does not count it
        if rank == 1 and block == 2:
            raise RuntimeError("no more")
        return result

    x = torch.ones(4)
    assert (step(x).tolist(), x.tolist()) == ([2.0] * 4, [1.0] * 4)
    one, two, four = failures(step)
    assert str(one).startswith("rank 1: it changes its argument x")
    assert (two, four) == ("rank 1: RuntimeError: no more", None)


# -- memory ----------------------------------------------------------------------------------------


class Memory:
    """What runs hold, and how much of the runs before is alive when each begins.

    References alone free it.
    """

    def __init__(self) -> None:
        gc.disable()
        self.held = list[Any]()
        self.n_alive = list[int]()

    def begin(self) -> None:
        self.n_alive.append(sum(each() is not None for each in self.held))

    def hold(self, **parts: Any) -> Any:
        """Memory whose life can be watched; tensors' own wrappers may be resurrected."""
        value = type("Value", (dict,), {})(parts)
        self.held.append(weakref.ref(value))
        return value


@triton.jit
def failing_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 32)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@on_each_rank(1, cases=["hook", "kernel", "function"], is_dist=False)
def test_a_failed_config_holds_nothing(rank: int, case: str):
    """Memory of its frames is free when the next candidate is launched, and of its run when the
    next run begins.
    """
    runs, launches = Memory(), Memory()

    def hook(args: Any) -> None:
        launches.begin()
        workspace = launches.hold()
        if args["BLOCK"] != 64:
            raise RuntimeError(f"no room beside {workspace}")

    @autotune([{"block": each} for each in (16, 32, 64)], None, cache=False)
    def work(x: torch.Tensor, block: int) -> torch.Tensor:
        if block == 32:
            raise ValueError(f"no room for {block}")
        return x + 1

    kernel = autotuned(
        add_kernel if case == "hook" else failing_kernel,
        configs=configs(16, 32, 64, pre_hook=hook if case == "hook" else None),
    )

    def step(x: torch.Tensor) -> Any:
        runs.begin()
        activations = runs.hold(x=x * 2)
        return work(activations["x"]) if case == "function" else launch(kernel, activations["x"])

    contextual_autotune(n_repeat=1, n_warmup=0, reset=list, cache=False)(step)(zeros())
    assert {*launches.n_alive, *runs.n_alive} == {0}
    assert len(launches.n_alive + runs.n_alive) > 3


@on_each_rank(1, is_dist=False)
def test_an_error_that_a_step_handles_keeps_its_traceback(rank: int):
    """A step made in an except clause, with a config that fails: what the clause handles is the
    user's.
    """

    def fail(args: Any) -> None:
        raise RuntimeError("no room")

    kernel = autotuned(configs=[*configs(16, pre_hook=fail), *configs(32)])
    step = contextual_autotune(n_repeat=1, n_warmup=0, reset=list, cache=False)(
        lambda x: launch(kernel, x)
    )

    def handle() -> None:
        try:
            raise ValueError("the user's")
        except ValueError:
            step(zeros())
            raise

    with pytest.raises(ValueError, match="the user's") as raised:
        handle()
    assert len(raised.traceback) == 2


def watched(memory: Memory) -> Callable[..., Any]:
    kernel = autotuned()

    def step(x: torch.Tensor, part: int = 0) -> Any:
        memory.begin()
        return memory.hold(y=launch(kernel, x.detach()) * x)

    return step


@on_each_rank(1, cases=["values", "with a graph", "with reset"], is_dist=False)
def test_the_first_value_is_freed(rank: int, case: str):
    """By the third run: until then it may be the call's, unless by ``reset`` the second one is as
    good.
    """
    memory, resets = Memory(), case == "with reset"
    step = contextual_autotune(n_repeat=2, n_warmup=1, reset=(lambda: None) if resets else None)(
        watched(memory)
    )
    step(torch.zeros(64, requires_grad=case == "with a graph"))
    assert memory.n_alive[:2] == [0, not resets]
    assert {*memory.n_alive[2:]} == {0}


@on_each_rank(1, is_dist=False)
def test_the_value_of_a_function_from_the_cache_is_freed_before_its_kernel_is_tuned(rank: int):
    """Any run of it is as good as the first; at the second length its kernel is tuned for
    itself.
    """
    for n in (64, 128):
        memory = Memory()
        autotune(
            [{"part": part} for part in range(2)], None, n_repeat=2, n_warmup=0, reset=lambda: None
        )(watched(memory))(torch.zeros(n))
    assert len(memory.n_alive) > 3
    assert {*memory.n_alive} == {0}


@on_each_rank(1, is_dist=False)
def test_gradients_of_the_first_run_are_freed(rank: int):
    """Each run makes them anew, and the last run's are the call's."""
    kernel, memory = autotuned(), Memory()

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def step(x: torch.Tensor) -> None:
        assert x.grad is None
        memory.begin()
        (launch(kernel, x.detach()) * x).sum().backward()
        memory.held.append(weakref.ref(x.grad))

    x: Any = torch.ones(64, requires_grad=True)
    step(x)
    assert x.grad[0].item() == 2.0
    assert {*memory.n_alive[2:]} == {0}


@on_each_rank(1, is_dist=False)
def test_a_machine_without_memory_in_the_last_run_is_told_with_what_to_do(rank: int):
    """The error is the call's own, and says that the next call runs with the winners; it does,
    without a replay.
    """
    kernel, n_runs, is_short = autotuned(), 0, True

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        if kernel.cache and is_short:  # the last run: kernels have their configs
            raise MemoryError("no memory left")
        return launch(kernel, x)

    with pytest.raises(MemoryError) as raised:
        step(zeros())
    is_short, n_before = False, n_runs
    assert any(
        "is tuned, and this was its last run" in note and "call again" in note
        for note in raised.value.__notes__
    )
    assert (step(zeros()).sum().item(), n_runs - n_before) == (64.0, 1)


# -- rests -----------------------------------------------------------------------------------------

LAUNCH_S, LOOK_S = 0.004, 0.001


class Device:
    """A clock whose device takes ``LAUNCH_S`` for each replay; the host takes ``LOOK_S`` for each
    look at it, and no time for all else.
    """

    def __init__(self) -> None:
        self.now_s = self.free_s = 0.0
        """The device works, or spins, until it is free."""
        self.rests_s: list[tuple[int, float]] = []
        """Replays that were queued and not done when each lead began, and its length."""
        self.replays: list[list[DeviceSpan]] = [[]]
        """The spans of each replay, the first one around all of it."""

    def prepare(self, lead_ms: float, *, is_cold: bool = True) -> None:
        """Spin, as the device's sleep does."""
        n_queued = sum(spans[0].end_s > self.now_s for spans in self.replays if spans)
        self.rests_s.append((n_queued, lead_ms / 1e3))
        self.free_s = max(self.free_s, self.now_s) + lead_ms / 1e3
        self.replays.append([])

    def span(self, *, is_covered: bool = False) -> DeviceSpan:
        self.replays[-1].append(DeviceSpan(self))
        return self.replays[-1][-1]

    def has_gap(self, span: DeviceSpan) -> bool:
        return False

    def launch_ms(self, span: DeviceSpan) -> float:
        return span.ms()


class DeviceSpan:
    """A stretch of the device's work: a launch, or the replay around it, which ends with it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.begin_s = self.end_s = 0.0

    def begin(self) -> None:
        self.begin_s = max(self.device.free_s, self.device.now_s)

    def end(self) -> None:
        self.end_s = self.device.free_s = max(self.device.free_s, self.begin_s + LAUNCH_S)

    def has_begun(self) -> bool:
        return self.device.now_s >= self.begin_s

    def is_done(self) -> bool:
        self.device.now_s += LOOK_S
        return self.device.now_s >= self.end_s

    def ms(self) -> float:
        return (self.end_s - self.begin_s) * 1e3


@on_each_rank(1, is_dist=False)
def test_the_device_rests_and_the_host_is_few_replays_ahead(rank: int):
    """At its power limit a device throttles, and a candidate would pay for those before it; what a
    rest takes follows from replays done.

    And each timed replay has as many events in it: a site that is through runs untimed, and its
    replays must not look faster.
    """
    device, kernels = (
        Device(),
        [autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32, 64, 128, 256, 512))],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "device_clock", lambda: device)
        contextual_autotune(is_dist=False, cache=False)(
            lambda: [launch(kernel, torch.arange(64.0)) for kernel in kernels]
        )()
    assert len(device.rests_s) > 20
    assert max(n_queued for n_queued, _ in device.rests_s) == 4
    assert min(rest_s for _, rest_s in device.rests_s[5:]) > 0.99 * LAUNCH_S
    assert {len(spans) for spans in device.replays[1:]} == {1, 3}


# -- finals by captured replays --------------------------------------------------------------------

COMPARED_AS_IT_IS = (
    'is compared as it is, without objective="graph", because it cannot be captured: '
)


class Graph:
    """A stand-in for CUDA's graphs: what a run takes on the device, in milliseconds, without what
    its host takes.
    """

    is_capturing = False

    def __init__(self, run: Callable[[], object], replay: Callable[[], object]) -> None:
        self.ms, self._also = list[float](), replay
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExactTime, "pass_ms", staticmethod(self.ms.append))
            patch.setattr(Graph, "is_capturing", True)
            run()

    def replay(self) -> None:
        ExactTime.pass_ms(sum(self.ms))
        self._also()


@contextmanager
def graphs(
    before: Callable[[int], object] = lambda k: None,
    replay: Callable[[], object] = lambda: None,
    obstacle: str = "",
) -> Iterator[list[Graph]]:
    """Graphs can be captured here.

    ``before``: called before each capture, with those so far. ``replay``: what each does besides.
    """
    captured_so_far = list[Graph]()

    def captured(run: Callable[[], object], pool: Any) -> Graph:
        before(len(captured_so_far))
        captured_so_far.append(Graph(run, replay))
        return captured_so_far[-1]

    def obstacle_in(run: Callable[[], object]) -> str:
        run()
        return obstacle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayer, "captured", captured)
        patch.setattr(replayer, "graph_pool", lambda: None)
        patch.setattr(replayer, "obstacle_in", obstacle_in)
        yield captured_so_far


def on_the_host(nargs: Any) -> None:
    """30 ms that no graph holds."""
    ExactTime.seconds += 0.03


def on_the_device(nargs: Any) -> None:
    """30 ms of the step beside the kernel."""
    ExactTime.pass_ms(30.0)


def unlike() -> Any:
    """The config of the fastest kernel slows the step down, and that of the next one its host: the
    third makes the fastest step.
    """
    return autotuned(
        configs=[
            *configs(64, pre_hook=on_the_device),
            *configs(32, pre_hook=on_the_host),
            *configs(16, 8),
        ]
    )


def blocks_of(step: Any) -> list[Any]:
    return [record.best.fields["BLOCK"] for record in step.records]


@on_each_rank(cases=["closure", "kernel", "graph"])
def test_the_graph_decides_if_it_is_asked_for(rank: int, objective: Any) -> Any:
    """Three objectives, three winners; no call waits for another rank in what was captured
    alone.
    """
    kernel, counted = unlike(), set[int]()

    @contextual_autotune(is_dist=True, objective=objective)
    def step(x: torch.Tensor) -> None:
        dist.all_reduce(launch(kernel, x))
        if Graph.is_capturing:  # peers that ask now hear of no collective of the capture
            counted.add(group_of(None, 3.0).n_issued)

    with graphs() as captured:
        step(zeros())
    assert len(counted) == bool(captured)
    (record,) = step.records
    assert blocks_of(step) == [{"closure": 16, "kernel": 64, "graph": 32}[objective]]
    assert bool(captured) == (objective == "graph")
    if captured:
        assert record.reason == "fastest step as a CUDA graph"
        assert (record.best.closure_ms or 9.0) < 1.0
        assert COMPARED_AS_IT_IS not in log()
        assert len(captured) <= 3 * 4  # finalists, and not their replays
    return record.winner


@on_each_rank()
def test_two_sites_share_their_graphs(rank: int) -> Any:
    """Both are compared in the same captured replays, each by what its own candidates add."""
    first, second = unlike(), autotuned(configs=[*configs(8, pre_hook=on_the_host), *configs(4)])
    step = contextual_autotune(is_dist=True, objective="graph")(
        lambda x: launch(second, launch(first, x))
    )
    with graphs():
        step(zeros())
    assert blocks_of(step) == [32, 8]


@on_each_rank(cases=["no device", "wait", "first", "later", "error"])
def test_no_rank_captures_what_another_one_cannot(rank: int, case: str) -> Any:
    """A rank has no device or waits for it, or fails in a capture: on both ranks the step decides
    as it is, and one line says why.
    """

    def before(n_captured: int) -> None:
        assert case != "wait", "captured though a rank cannot"
        if rank == 1 and n_captured == {"first": 0, "later": 5, "error": -1}[case]:
            raise RuntimeError("not now")

    def failing(nargs: Any) -> None:
        if rank == 1 and Graph.is_capturing and case == "error":
            raise RuntimeError("not now")

    kernel = autotuned(
        configs=[*configs(32, pre_hook=on_the_host), *configs(16, pre_hook=failing), *configs(8, 4)]
    )

    @contextual_autotune(is_dist=True, objective="graph")
    def step(x: torch.Tensor) -> torch.Tensor:
        # A long step's finals have batches of few replays.
        ExactTime.pass_ms(300.0 if case == "later" else 0.1)
        return launch(kernel, x)

    if case == "no device":
        step(zeros())
    else:
        with graphs(
            before, obstacle="it waits for the device in step.py:7" * (rank == 1 and case == "wait")
        ):
            step(zeros())
    why = {
        "no device": "rank 0: there is no CUDA device",
        "wait": "rank 1: it waits for the device in step.py:7",
    }
    assert log().count(COMPARED_AS_IT_IS + why.get(case, "rank 1: RuntimeError: not now")) == 1
    assert blocks_of(step) == [16]
    assert not any(each.failure for each in step.records[0].candidates)
    return step.records[0].reason


@on_each_rank()
def test_a_replayed_graph_is_undone_and_a_captured_run_is_not(rank: int):
    """Under ``restore_value`` each replay finds what the call found; the capture has changed
    nothing, and nothing is put back after it.
    """
    kernel = autotuned(
        accumulate_kernel, configs=configs(16, 32, pre_hook=on_the_host), restore_value=["y_ptr"]
    )
    x, y, found = ones(2.0), ones(), list[float]()
    step = contextual_autotune(is_dist=True, objective="graph")(
        lambda x, y: launch(kernel, x, y).sum()
    )

    def replay() -> None:
        found.append(y[0].item())
        y.add_(x)

    class Undone(Graph):
        def __init__(self, *given: Any) -> None:
            before = y.clone()
            super().__init__(*given)
            assert y[0] == 3.0
            y.copy_(before)

    with graphs(replay=replay), pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.Graph", Undone)
        step(x, y)
    assert {*found} == {1.0}
    assert y[0] == 3.0


@on_each_rank()
def test_collectives_of_a_capture_do_not_count(rank: int) -> Any:
    """One rank has captured a collective and the other none: they meet in the next call all the
    same.
    """
    n_captured, name = 0, "_get_sequence_number_for_group"
    own = getattr(dist.ProcessGroup, name)

    def before(n: int) -> None:
        nonlocal n_captured
        if rank == 1:
            raise RuntimeError("not now")
        n_captured += 1

    kernel = autotuned(configs=configs(32, 16, 8))

    @contextual_autotune(is_dist=True, objective="graph")
    def step(x: torch.Tensor) -> None:
        launch(kernel, x)
        if not Graph.is_capturing:  # gloo's cannot be captured: its count stands for it
            dist.all_reduce(torch.ones(1))

    with graphs(before), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, name, lambda group: own(group) + n_captured)
        step(zeros())
        assert (n_captured > 0) == (rank == 0)
        step(torch.zeros(128))
    assert "goes on with the configs it has" not in log()
    return len(step.records)


@on_each_rank()
def test_a_step_tuned_in_its_calls_says_that_none_is_captured(rank: int) -> Any:
    """Calls that count are not captured: one line, and the choice of the default."""
    kernel, total = autotuned(configs=configs(16, 64)), zeros()

    def step(k: int) -> None:
        total.add_(launch(kernel, ones()))

    tuned = contextual_autotune(is_dist=True, objective="graph", max_slowdown=1.0)(
        named("counted", step)
    )
    with graphs() as captured:
        run_job(tuned, is_over=lambda: bool(tuned.records))
    assert (blocks_of(tuned), captured) == ([64], [])
    return log().count(f"{COMPARED_AS_IT_IS}rank 0: its replays are calls that count")


# -- kernels inside a function ---------------------------------------------------------------------


@on_each_rank(1, is_dist=False)
def test_a_known_config_runs_once_also_where_kernels_inside_are_tuned(rank: int):
    """The run that meets them is none that counts."""

    def tuned() -> tuple[list[float], list[bool]]:
        kernel = autotuned(blocks=(2, 4))

        @autotune(BLOCKS, None, n_warmup=0, n_repeat=1)
        def step(c: torch.Tensor, block: int) -> torch.Tensor:
            return launch(kernel, c)

        return step(torch.ones(4)).tolist(), [record.is_recalled for record in step.records]

    assert tuned() == ([2.0] * 4, [False, False])
    for path in Path(os.environ["DIST_TUNE_CACHE_DIR"]).glob("*add_kernel*/*.json"):
        path.unlink()
    assert tuned() == ([2.0] * 4, [False, True])
