"""Launches with a known config inside a tuned closure: arguments by name as vanilla has them, and no second look-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import autotuned

pytestmark = pytest.mark.once
N = 64


class _Names(list[str]):
    """Names of a kernel's arguments; counts how often it is searched."""

    n_searches = 0

    def __contains__(self, name: object) -> bool:
        self.n_searches += 1
        return super().__contains__(name)


def _steady(rank: int) -> Any:
    kernel, x, y, seen = autotuned(blocks=(16, 32)), torch.zeros(N), torch.zeros(N), list[Any]()

    def grid(meta: dict[str, Any]) -> tuple[int]:
        seen.append(list(kernel.nargs))
        return (N // meta["BLOCK"],)

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def step() -> Any:
        kernel[grid](x, y, n=N)
        return kernel.nargs

    first = step()
    is_same = all(names == ["x_ptr", "y_ptr"] for names in seen)
    kernel.arg_names = names = _Names(kernel.arg_names)
    return first, step(), is_same and seen[-1] == ["x_ptr", "y_ptr"], names.n_searches


@pytest.mark.processes
def test_a_steady_launch_looks_its_config_up_once():
    """Only keywords are searched among the names: Triton's own look-up, which searches each argument, is not made."""
    assert values(on_ranks(1, _steady, is_dist=False)) == [(None, None, True, 3)]


def _failing(rank: int) -> Any:
    kernel, is_broken = autotuned(blocks=(16, 32)), [False]

    def grid(meta: dict[str, Any]) -> tuple[int]:
        if is_broken:
            raise ValueError("no grid")
        return (N // meta["BLOCK"],)

    step = contextual_autotune(n_repeat=1, n_warmup=0)(lambda x: kernel[grid](x, torch.empty_like(x), N))
    is_broken.clear()
    step(torch.zeros(N))
    is_broken.append(True)
    try:
        step(torch.zeros(N))
    except ValueError as error:
        return str(error), kernel.nargs
    return None


@pytest.mark.processes
def test_a_launch_that_raises_keeps_no_arguments():
    """The error is the grid's, and the tensors are free."""
    assert values(on_ranks(1, _failing, is_dist=False)) == [("no grid", None)]
