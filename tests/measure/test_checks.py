"""Whether what a function returns is right: which kind of check it is, what it says, and that a
check leaves no traces.

What stands in memory before a run is test_poison.py's.
"""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dist_tune import matches
from dist_tune.measure.checks import Checker
from tests.checked_runs import A, B, judge, run


def product(
    a: torch.Tensor, b: torch.Tensor, scale: float = 1.0, config: object = None
) -> torch.Tensor:
    return scale * (a @ b)


class Layer:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a @ self.weight

    def reference(self, a: torch.Tensor) -> torch.Tensor:
        return torch.einsum("mk,kn->mn", a, self.weight)

    def is_right(self, result: torch.Tensor, a: torch.Tensor) -> bool:
        return torch.allclose(result, a @ self.weight, atol=1e-4)


class Module(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def close(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(result, a @ b, atol=1e-4)


def asserts(result: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.testing.assert_close(result, args[0] @ args[1])


def reference(a: torch.Tensor, b: torch.Tensor, bias: None = None) -> torch.Tensor:
    return torch.einsum("mk,kn->mn", a, b)


CHECKS = [
    close,
    asserts,
    lambda result, *args, **kwargs: close(result, *args),
    functools.partial(
        lambda result, a, b, atol: torch.allclose(result, a @ b, atol=atol), atol=1e-4
    ),
    lambda result, a, b, eager=False: None if close(result, a, b) else False,
    lambda result, a, b: torch.tensor(close(result, a, b)),
    lambda result, a, b: np.bool_(close(result, a, b)),
]
REFERENCES = [
    reference,
    lambda x, y: x @ y,
    torch.matmul,
    torch.Tensor.matmul,
    Module(),
    functools.partial(reference, bias=None),
    lambda a, *args: a @ args[0],
    lambda a, b, *, bias=None: a @ b,
    matches(lambda *args, **kwargs: args[0] @ args[1]),
    torch.no_grad()(lambda a, b: a @ b),
]


@pytest.mark.parametrize("check", [*CHECKS, *REFERENCES])
def test_a_check_is_told_from_a_reference(check: Callable[..., Any]):
    """By what its parameters allow; the right result is right with each, and another is wrong."""
    checker = Checker(check, product)
    assert run(checker, product, A, B) == ""
    assert run(checker, lambda a, b: 2 * (a @ b), A, B) != ""
    assert run(checker, product, A, B) == ""


def test_keywords_count_as_they_are_given():
    """A call by keyword is bound by keyword; a reference without that keyword, and a check without
    it, are no callables for it.
    """
    assert run(Checker(reference, product), product, A, b=B) == ""
    assert run(Checker(lambda result, a, *, b: close(result, a, b), product), product, A, b=B) == ""
    assert (
        run(
            Checker(lambda result, a, b, scale: close(result / scale, a, b), product),
            product,
            a=A,
            b=B,
            scale=2.0,
        )
        == ""
    )
    assert run(Checker(product, product), product, A, B, scale=2.0) == ""
    with pytest.raises(
        TypeError,
        match=(
            r"close\(result.*can be called neither as a check.*2 positional arguments and"
            r" \['scale'\]"
        ),
    ):
        Checker(close, product).begin((A, B), {"scale": 2.0}, is_repeated=False)


def test_methods_are_bound():
    """Of an object, and as decorated in the class body, where the object is the first argument."""
    layer = Layer(B)
    assert run(Checker(layer.reference, layer.forward), layer.forward, A) == ""
    assert run(Checker(layer.is_right, layer.forward), layer.forward, A) == ""
    assert run(Checker(Layer.reference, Layer.forward), Layer.forward, layer, A) == ""


def test_the_first_parameter_decides_where_both_fit():
    """A reference has the name of the function's first parameter there."""

    def function(x: torch.Tensor, config: object = None) -> torch.Tensor:
        return x + 1

    asked = []
    checker = Checker(lambda result, x=None: asked.append(x), function)
    assert run(checker, function, A) == ""
    assert asked == [A]
    checker = Checker(lambda x, y=1: x + y, function)
    assert run(checker, function, A) == ""
    assert run(checker, lambda x: x, A) != ""


@pytest.mark.parametrize("answer", [torch.zeros(3), 0.5, 1, "yes", A @ B])
def test_an_answer_that_is_none_is_an_error(answer: Any):
    """A check that returns a tensor is a reference whose parameters do not say so: the message says
    how to say it.
    """
    checker = Checker(lambda result, *args: answer, product)
    checker.begin((A, B), {}, is_repeated=False)
    with pytest.raises(
        TypeError, match=r"returned (Tensor|float|int|str), need None or a bool.*matches\("
    ):
        checker.judge(A @ B, (A, B), {})


def test_what_an_assertion_says_is_the_verdict():
    """On one line, without the tail; an assertion that says nothing is quoted."""

    def silent(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if result.sum() != 0:
            raise AssertionError

    said = run(Checker(asserts, product), lambda a, b: torch.zeros(8, 4), A, B)
    assert said.startswith("Tensor-likes are not close!; Mismatched elements: 32 / 32 (100.0%)")
    assert "\n" not in said
    assert run(Checker(silent, product), product, A, B).startswith("raise AssertionError (line ")
    assert (
        run(Checker(close, product), lambda a, b: torch.zeros(8, 4), A, B) == "close returned False"
    )


def test_other_errors_of_a_check_are_the_users():
    """And so are those of a reference."""
    checker = Checker(lambda result, a, b: result.no_such_thing, product)
    with pytest.raises(AttributeError, match="no_such_thing"):
        run(checker, product, A, B)
    with pytest.raises(RuntimeError, match="does not broadcast"):
        run(Checker(reference, product), product, A, A)


@pytest.mark.parametrize("out", [(), (torch.empty(8, 16),)], ids=["new", "out"])
def test_random_numbers_and_gradients_are_left_alone(out: tuple[torch.Tensor, ...]):
    """A reference with dropout draws what the function draws, which draws what it would have drawn
    without it.
    """
    drawn: list[tuple[float, float, float]] = []

    def function(a: torch.Tensor, *out: torch.Tensor) -> torch.Tensor:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        result = torch.nn.functional.dropout(a)
        return out[0].copy_(result.detach()) if out else result

    def dropped(a: torch.Tensor, *out: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        random.random()
        np.random.rand()
        torch.rand(())
        return torch.nn.functional.dropout(a)

    def after(call: Callable[[], Any]) -> float:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        call()
        return float(torch.rand(()))

    checker, a = Checker(dropped, function), A.clone().requires_grad_()
    assert after(lambda: function(a, *out)) == after(lambda: run(checker, function, a, *out))
    assert drawn[0] == drawn[1]
    assert run(checker, lambda a, *out: out[0] if out else torch.full_like(a, 9.0), a, *out) != ""
    assert judge(checker, function, a, *out) == ""
    checker.begin((a, *out), {}, is_repeated=False)
    result = function(a)
    checker.judge(result, (a, *out), {})
    result.sum().backward()
    assert a.grad is not None


def test_a_reference_runs_once_for_one_call():
    """Again for other arguments, and for the same ones where torch has written to them since.

    None of them is kept alive.
    """
    asked: list[int] = []

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        asked.append(1)
        return a @ b

    checker = Checker(counted, product)
    a = A.clone()
    for _ in range(3):
        assert run(checker, product, a, B) == ""
    assert len(asked) == 1
    assert run(checker, product, A, B) == ""
    assert len(asked) == 2
    assert run(checker, product, a, B) == ""
    a *= 2
    assert run(checker, product, a, B) == ""
    assert len(asked) == 4
    assert run(checker, product, a, B.clone()) == ""
    assert len(asked) == 5
    alive = weakref.ref(a)
    del a
    assert alive() is None


def test_a_reference_that_returns_an_argument_is_copied():
    """The function is about to change it."""
    x = torch.ones(4)
    checker = Checker(lambda x: x.mul_(2), lambda x: x)
    for k in range(1, 4):
        assert run(checker, lambda x: x.copy_(x + x), x) == ""
        assert x.tolist() == [2.0**k] * 4
    assert run(checker, lambda x: x, x) != ""


def test_matches_can_be_called_as_a_check():
    """In a test of the user's own, say. A tolerance is a number from zero."""
    check = matches(torch.matmul, rtol=1e-4)
    check(A @ B, A, B)
    with pytest.raises(AssertionError, match="wrong by"):
        check(A @ B + 1, A, B)
    for name in ("rtol", "atol"):
        for tolerance in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{name} is"):
                matches(torch.matmul, **{name: tolerance})
