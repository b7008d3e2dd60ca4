"""Results that the program keeps, errors of the user's functions, and values that are no poison."""

from __future__ import annotations

import pytest
import torch

from dist_tune import matches
from dist_tune.measure.checks import Checker
from tests.checked_runs import A, B, judge, multiply, run

pytestmark = pytest.mark.once


def test_results_of_other_calls_are_not_poisoned():
    """Layers of one step: what one has returned is the next one's input, and kept for the backward pass."""
    weights = [torch.randn(4, 4) for _ in range(3)]

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    for check in (layer, lambda result, x, w: torch.equal(result, torch.relu(x @ w))):
        checker = Checker(check, layer)
        for k in range(4):
            kept = [torch.randn(4, 4)]
            for w in weights:
                checker.begin((kept[-1], w), {}, is_repeated=k % 2 > 0)
                assert not any(each.isnan().any() for each in kept)
                kept.append(layer(kept[-1], w))
                assert checker.judge(kept[-1], (kept[-2], w), {}) == ""


def test_an_earlier_result_that_somebody_keeps_is_put_back():
    """Whoever kept it finds it as it was."""
    checker = Checker(multiply, multiply)
    kept = []
    for k in range(4):
        checker.begin((A, B), {}, is_repeated=k % 2 > 0)
        kept.append(A @ B)
        assert checker.judge(kept[-1], (A, B), {}) == ""
    assert all(torch.equal(each, A @ B) for each in kept)


def test_a_run_without_a_verdict_leaves_things_as_they_were():
    """It raised: what was poisoned for it is put back, at the latest before the next run."""
    x = torch.ones(4)
    checker = Checker(lambda result, x: True, lambda x: x)
    assert judge(checker, lambda x: x.add_(1), x) == ""
    checker.begin((x,), {}, is_repeated=True)
    assert x.isnan().all()
    checker.restore()
    assert x.tolist() == [2.0] * 4
    checker.begin((x,), {}, is_repeated=True)
    checker.begin((x,), {}, is_repeated=True)
    checker.restore()
    assert x.tolist() == [2.0] * 4


def test_errors_of_the_users_leave_things_as_they_were():
    """Of a check, and of a reference that does not take NaN: it is asked again without."""
    x, calls = torch.ones(4), []

    def check(result: torch.Tensor, x: torch.Tensor) -> bool:
        calls.append(x.isnan().any())
        if len(calls) == 2:
            raise KeyError("mine")
        return True

    checker = Checker(check, lambda x: x)
    assert run(checker, lambda x: x, x) == ""
    with pytest.raises(KeyError):
        run(checker, lambda x: x, x, is_repeated=True)
    assert calls[1]
    assert x.tolist() == [1.0] * 4

    def picky(x: torch.Tensor) -> torch.Tensor:
        assert not x.isnan().any()
        return x + 1

    checker = Checker(picky, lambda x: x)
    for k in range(1, 4):
        assert judge(checker, lambda x: x.add_(1), x) == ""
        assert x.tolist() == [1.0 + 2 * k] * 4


def test_integers_that_somebody_holds_are_never_poisoned():
    """They may be flags that a kernel waits for, or indices."""
    flags, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool)
    checker = Checker(lambda result, flags, out: True, lambda flags, out: (flags, out))
    for _ in range(3):
        assert judge(checker, lambda flags, out: (flags, out), flags, out) == ""
        checker.begin((flags, out), {}, is_repeated=True)
        assert flags.eq(0).all()
        assert not out.any()


def test_nan_that_is_expected_stays_in_a_given_output():
    """It is the function's own, and not poison to be taken away."""

    def right(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(4) == 0, torch.nan, 2 * x)

    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(right(x, out))

    x, out = torch.arange(4.0), torch.zeros(4)
    checker = Checker(matches(right), function)
    for k in range(3):
        out.zero_()  # as the closure does before its launch
        assert run(checker, function, x, out, is_repeated=k > 0) == ""
        assert out[0].isnan()
        assert out[1:].tolist() == [2.0, 4.0, 6.0]
