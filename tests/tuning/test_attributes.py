"""State that a step reaches beside its arguments: generators, deques, attributes of objects. What each replay repeats is told."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import autotuned, launch

pytestmark = [pytest.mark.once, pytest.mark.processes]

QUICK: Any = {"n_repeat": 2, "n_warmup": 1}


class _Trainer:
    def __init__(self) -> None:
        self.total, self.log = torch.zeros(64), [torch.zeros(64), torch.zeros(64)]
        self.kernel = autotuned(blocks=(16, 32, 64))

    def step(self, x: torch.Tensor) -> None:
        y = launch(self.kernel, x)
        self.total.add_(y)
        self.log[1].add_(y)


class _Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = torch.nn.Linear(1, 1)
        self.inner.total = torch.zeros(64)  # no buffer
        self.kernel = autotuned(blocks=(16, 32, 64))

    def step(self, x: torch.Tensor) -> None:
        self.inner.total += launch(self.kernel, x)


class _Numbers:
    __slots__ = ("array", "kernel", "n", "parts")

    def __init__(self) -> None:
        self.array, self.parts, self.n = np.zeros(2), {"rows": [torch.zeros(2)]}, 0
        self.kernel = autotuned(blocks=(16, 32, 64))

    def step(self, x: torch.Tensor) -> None:
        launch(self.kernel, x)
        self.array += 1
        self.parts["rows"][0] += 1
        self.n += 1


OWNERS = {"object": _Trainer, "module": _Module, "slots": _Numbers}


def _run(rank: int, kind: str) -> int:
    owner: Any = OWNERS[kind]()
    step = contextual_autotune(**QUICK)(owner.step)
    step(torch.ones(64))
    return len(step.records)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("object", ["self.total", "self.log[1]"]),
        ("module", ["self.inner.total"]),
        ("slots", ["self.array", "self.parts['rows'][0]", "self.n"]),
    ],
)
def test_what_plain_objects_hold_is_repeated_and_told_once(kind: str, names: list[str]):
    """In attributes, slots, lists in dicts and arrays: the step's own business, and it is tuned."""
    (outcome,) = on_ranks(1, _run, kind, is_dist=False)
    assert values([outcome]) == [1]
    (line,) = [each for each in outcome.log.splitlines() if "each replay does so again" in each]
    assert all(name in line for name in names), line


def _drawn(rank: int) -> Any:
    generator, kernel = torch.Generator().manual_seed(5), autotuned(blocks=(16, 32, 64))

    def step() -> torch.Tensor:
        return launch(kernel, torch.zeros(64)) * torch.rand(64, generator=generator)

    step = contextual_autotune(**QUICK)(step)
    values = [step().tolist(), torch.rand(3, generator=generator).tolist()]
    generator.manual_seed(5)
    return values == [torch.rand(64, generator=generator).tolist(), torch.rand(3, generator=generator).tolist()], len(step.records)


def test_a_step_with_a_generator_of_its_own_draws_once():
    """It is not tuned: the value, and the numbers that are drawn after it, are those of a plain call."""
    assert values(on_ranks(1, _drawn, is_dist=False)) == [(True, 0)]


def _dropped(rank: int) -> Any:
    kernel, mask = autotuned(blocks=(16, 32, 64)), torch.nn.Dropout()
    step = contextual_autotune(**QUICK)(lambda x: mask(launch(kernel, x)) + random.random() + np.random.rand())
    drawn = []
    for function in (step, step.__wrapped__):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        drawn.append((function(torch.zeros(64)).tolist(), torch.rand(1).item(), random.random(), float(np.random.rand())))
    return drawn[0] == drawn[1], len(step.records)


def test_torch_s_and_python_s_own_generators_are_put_back():
    """A step that draws from them is tuned: each run draws the same, and the last one what a plain call would."""
    assert values(on_ranks(1, _dropped, is_dist=False)) == [(True, 1)]


def _queued(rank: int) -> Any:
    history, kernel = deque([torch.zeros(64)]), autotuned(blocks=(16, 32, 64))
    contextual_autotune(**QUICK)(lambda past: past[0].add_(launch(kernel, torch.ones(64))))(history)
    return history[0][0].item()


def test_tensors_in_a_deque_are_put_back():
    """A deque is a container like a list."""
    assert values(on_ranks(1, _queued, is_dist=False)) == [2.0]
