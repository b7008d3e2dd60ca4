"""State that a step reaches beside its arguments: generators, deques, attributes of objects. What is not put back is told."""

from __future__ import annotations

from collections import deque
from typing import Any

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


def _run(rank: int, kind: str) -> None:
    owner: Any = _Trainer() if kind == "object" else _Module()
    contextual_autotune(**QUICK)(owner.step)(torch.ones(64))


@pytest.mark.parametrize(("kind", "names"), [("object", "self.total, self.log[1]"), ("module", "self.inner.total")])
def test_attributes_that_are_not_put_back_are_told_once(kind: str, names: str):
    """Tensors that torch has written to in the first run, and that are no arguments, captured values, parameters or buffers."""
    outcomes = on_ranks(1, _run, kind, is_dist=False)
    values(outcomes)
    assert outcomes[0].log.count(f"changes {names} in place, and every replay does so again") == 1


def _arguments(rank: int) -> None:
    class Holder:
        view = None

    holder: Any = Holder()
    total, kernel = torch.zeros(64), autotuned(blocks=(16, 32, 64))
    holder.view = total[:32]

    def step(total: torch.Tensor, holder: Any) -> None:
        total.add_(launch(kernel, torch.ones(64)))

    contextual_autotune(**QUICK)(step)(total, holder)
    assert total[0] == 2.0


def test_views_of_what_is_put_back_are_not_told():
    """They count writes together with the argument that they are views of."""
    outcomes = on_ranks(1, _arguments, is_dist=False)
    values(outcomes)
    assert "every replay does so again" not in outcomes[0].log


def _drawn(rank: int, is_in_place: bool) -> Any:
    generator, total, kernel = torch.Generator().manual_seed(5), torch.zeros(64), autotuned(blocks=(16, 32, 64))

    def step(total: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, torch.zeros(64)) * torch.rand(64, generator=generator)
        return total.add_(y) if is_in_place else y

    values = [contextual_autotune(**QUICK)(step)(total).tolist(), torch.rand(3, generator=generator).tolist()]
    generator.manual_seed(5)
    return values == [torch.rand(64, generator=generator).tolist(), torch.rand(3, generator=generator).tolist()]


@pytest.mark.parametrize("is_in_place", [True, False])
def test_generators_that_a_step_has_captured_draw_as_in_one_run(is_in_place: bool):
    """The value, and the numbers that are drawn after it, are those of a step that was not tuned."""
    assert values(on_ranks(1, _drawn, is_in_place, is_dist=False)) == [True]


def _queued(rank: int) -> Any:
    history, kernel = deque([torch.zeros(64)]), autotuned(blocks=(16, 32, 64))
    contextual_autotune(**QUICK)(lambda past: past[0].add_(launch(kernel, torch.ones(64))))(history)
    return history[0][0].item()


def test_tensors_in_a_deque_are_put_back():
    """A deque is a container like a list."""
    assert values(on_ranks(1, _queued, is_dist=False)) == [2.0]
