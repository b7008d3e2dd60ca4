"""Free memory holds poison before a run."""

from __future__ import annotations

import pytest
import torch

from dist_tune.measure.checks import Checker
from tests.checked_runs import A, run

pytestmark = pytest.mark.once


def test_memory_that_nobody_holds_is_poisoned(monkeypatch: pytest.MonkeyPatch):
    """What is allocated like the last result, before a run, is filled and given back."""
    filled: list[tuple[int, torch.dtype]] = []
    own = torch.Tensor.fill_

    def fill(self: torch.Tensor, value: int) -> torch.Tensor:
        filled.append((self.numel(), self.dtype))
        return own(self, value)

    monkeypatch.setattr(torch.Tensor, "fill_", fill)
    for dtype, view in [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int16),
        (torch.int32, torch.uint8),
        (torch.complex64, torch.int32),
    ]:
        a = torch.ones(33).to(dtype)
        checker = Checker(lambda a: a + 1, lambda a: a)
        filled.clear()
        assert run(checker, lambda a: a + 1, a) == ""
        n = 33 * dtype.itemsize // view.itemsize
        assert filled == [(n, view)] * 2  # like what is expected, for what may be left of the reference
        assert run(checker, lambda a: a + 1, a) == ""
        assert filled == [(n, view)] * 4
    filled.clear()
    run(Checker(lambda a: a > 0, lambda a: a), lambda a: a > 0, A)  # bools
    assert filled == []
