"""What a call is given is as it was: a reference leaves no traces in arguments, and generators draw
again what they drew.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dist_tune.measure.inputs import RngState, ask


@dataclass
class Both:
    left: torch.Tensor
    n: int


def test_what_torch_has_written_is_undone():
    """Whole or in part, through views, in lists, by keyword, after an error; what is returned is
    what it was, in memory of its own.
    """
    a, b, c = torch.ones(4), torch.ones(2, 2), torch.ones(3, dtype=torch.complex64)

    def reference(a: torch.Tensor, others: list[torch.Tensor], *, c: torch.Tensor) -> Any:
        a[1:].mul_(2)
        others[0].t()[0].zero_()
        c.copy_(c * 1j)
        return a, {"b": others[0][:1], "n": 3}, Both(c, 4)

    def failing(*args: Any, **kwargs: Any) -> None:
        reference(*args, **kwargs)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        ask(failing, (a, [b]), {"c": c})
    result = ask(reference, (a, [b]), {"c": c})
    for each in (a, b, c):
        assert torch.equal(each, torch.ones_like(each))
    assert result[0].tolist() == [1.0, 2.0, 2.0, 2.0]
    assert result[1]["b"].tolist() == [[0.0, 1.0]]
    assert torch.equal(result[2]["left"], torch.full((3,), 1j))
    assert (result[1]["n"], result[2]["n"]) == (3, 4)


def test_inference_tensors_are_put_back():
    """Torch does not count what is written to them, so their bits are compared; NaN is equal to
    itself.
    """
    with torch.inference_mode():
        a = torch.tensor([1.0, float("nan")])

    def reference(a: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return a.add_(1) + 0

    assert ask(reference, (a,), {})[0] == 2.0
    assert a[0] == 1.0
    assert ask(lambda a: a[0] + 5, (a,), {}) == 6.0


def test_a_copy_that_does_not_fit_is_not_made():
    """Then the argument is what the reference has made of it.

    Others own no memory: sparse, empty, expanded, conjugate.
    """
    a = torch.ones(4)
    with mock.patch.object(torch.Tensor, "clone", side_effect=torch.OutOfMemoryError):
        assert ask(lambda a: float(a.mul_(3).sum()), (a,), {}) == 12.0
    assert a.eq(3).all()
    args = (
        torch.eye(2).to_sparse(),
        torch.empty(0),
        torch.ones(1).expand(5),
        torch.ones(2, dtype=torch.complex64).conj(),
    )
    assert ask(lambda *args: len(args), args, {}) == 4


def draw() -> tuple[float, ...]:
    return (
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.rand()),
        float(np.random.normal()),
        torch.rand(()).item(),
    )


def test_generators_draw_again_what_they_drew():
    """Python's, numpy's and torch's, as often as asked; of a pair of Gaussian numbers the one in
    waiting, too.
    """
    draw()
    early = RngState()
    first = draw()
    late = RngState()
    second = draw()
    for state, expected in ((early, first), (late, second), (early, first)):
        state.restore()
        assert draw() == expected
    assert len({*first, *second}) == 10
