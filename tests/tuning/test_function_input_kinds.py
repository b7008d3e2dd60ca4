"""Arguments of an autotuned function that are put back whatever kind of tensor they are, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import autotune
from tests.function_options import BLOCKS, QUICK, quiet

pytestmark = pytest.mark.once
NESTED = ([torch.ones(2), torch.ones(3)],)


@pytest.fixture(autouse=True)
def _folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(6)[1:4], lambda: torch.ones(2, 3).t(), lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.ones(3, dtype=torch.float16), lambda: torch.full((3,), torch.nan), lambda: torch.ones(3, dtype=torch.int64),
        lambda: torch.nested.nested_tensor(*NESTED, layout=torch.jagged), lambda: torch.nested.nested_tensor(*NESTED),
    ],
)  # fmt: skip
def test_tensors_of_all_kinds_are_put_back(make: Callable[[], torch.Tensor]):
    """Views, other types, NaN, wrappers of tensors, tensors without strides."""

    def parts(tensor: torch.Tensor) -> list[Any]:
        return [each.clone() for each in (tensor.unbind() if tensor.is_nested else [tensor])]

    @autotune(BLOCKS, None, **QUICK)
    def step(c: torch.Tensor, block: int) -> torch.Tensor:
        return c.mul_(2)

    c = make()
    before = parts(c)
    step(c)
    torch.testing.assert_close(parts(c), [2 * each for each in before], equal_nan=True)


def test_gradients_are_those_of_one_call():
    """Of a function that writes to a tensor through which a backward pass goes, and of one that makes that pass itself."""

    @autotune(BLOCKS, None, **QUICK)
    def forward(c: torch.Tensor, block: int) -> torch.Tensor:
        return c.mul_(3)

    @autotune(BLOCKS, None, **QUICK)
    def both(x: torch.Tensor, y: torch.Tensor, block: int) -> None:
        (x * y).sum().backward()

    x, y = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    forward(2 * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 4
    mine = x.grad
    both(x, y)
    assert x.grad is mine
    assert x.grad.tolist() == [7.0] * 4
    assert y.grad is not None
    assert y.grad.tolist() == [1.0] * 4
    view = (2 * x)[:2]
    autotune(BLOCKS, None, **QUICK)(forward.__wrapped__)(view)
    assert view.tolist() == [6.0] * 2
