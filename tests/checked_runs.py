"""Functions that write to what they are given, or do not, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dist_tune.measure.checks import Checker

A = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
B = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Function = Callable[..., Any]


def run(
    checker: Checker, function: Function, *args: Any, is_repeated: bool = False, **kwargs: Any
) -> str:
    """What is said of one run."""
    checker.begin(args, kwargs, is_repeated=is_repeated)
    return checker.judge(function(*args, **kwargs), args, kwargs)


def judge(checker: Checker, candidate: Function, *args: Any, **kwargs: Any) -> str:
    """What is said of a candidate, run as often as a tuning runs it."""
    said = (
        run(checker, candidate, *args, is_repeated=k > 0, **kwargs) for k in range(checker.n_runs)
    )
    return next(filter(None, said), "")


def is_right(result: Any, *args: Any, **kwargs: Any) -> bool:
    """A check of the user's, that knows what a @ b is."""
    result = result[0] if isinstance(result, tuple) else result
    return bool(torch.allclose(result[:8], args[0] @ args[1], atol=1e-4))


def multiply(a: torch.Tensor, b: torch.Tensor, *args: Any) -> torch.Tensor:
    """A reference that does not look at what else there is."""
    return a @ b


def out_function(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out=out)


def out_nothing(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out


def out_half(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out[:4] = (a @ b)[:4]
    return out


def accumulate(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.addmm_(a, b)
