"""A config that returns something wrong, or does not write all of it, is found by each way to tune: one check serves them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import autotune, contextual_autotune, matches
from dist_tune.measure import WallSpan
from dist_tune.offline import benchmark_config, tune_kernel
from dist_tune.testing import ExactTime
from tests.function_options import QUICK, quiet

pytestmark = pytest.mark.once

A, B = torch.arange(32.0).view(8, 4) / 8, torch.ones(4, 4)
RIGHT = A @ B
Write = Callable[[torch.Tensor, torch.Tensor], object]
Form = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)
    monkeypatch.setattr(WallSpan, "now", ExactTime.now)


@dataclass
class Output:
    value: torch.Tensor
    n: int = 3


def all_of_it(out: torch.Tensor, result: torch.Tensor) -> None:
    out.copy_(result)


def nothing(out: torch.Tensor, result: torch.Tensor) -> None:
    pass


def half_of_it(out: torch.Tensor, result: torch.Tensor) -> None:
    out[:4] = result[:4]


def all_but_one(out: torch.Tensor, result: torch.Tensor) -> None:
    out.view(-1)[:-1] = result.view(-1)[:-1]


def with_nan(out: torch.Tensor, result: torch.Tensor) -> None:
    out.copy_(result)[3, 1] = torch.nan


def one_off(out: torch.Tensor, result: torch.Tensor) -> None:
    out.copy_(result)[5, 2] *= 2


def zeros(out: torch.Tensor, result: torch.Tensor) -> None:
    out.zero_()


WRITES = [nothing, half_of_it, all_but_one, with_nan, one_off, zeros]
FORMS: dict[str, Form] = {
    "tensor": lambda out: out,
    "view": lambda out: out.view(-1).view(8, 4),
    "transposed": lambda out: out.t(),
    "tuple": lambda out: (torch.ones(3), out),
    "aliases": lambda out: [out, out.view(-1), out[2:]],
    "dict": lambda out: {"out": out, "n": 3},
    "dataclass": Output,
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
"""Formats of the result."""
CASES = [
    *(pytest.param(write, form, torch.float32, id=f"{write.__name__}-{name}") for write in WRITES for name, form in FORMS.items()),
    *(
        pytest.param(write, FORMS["tensor"], dtype, id=f"{write.__name__}-{dtype}")
        for write in (nothing, half_of_it)
        for dtype in DTYPES[1:]
    ),
]


class Kernel:
    """Writes to memory that holds the right answer already, the same in each call, as an allocator gives it."""

    def __init__(self, wrong: Write, form: Form, dtype: torch.dtype) -> None:
        self.right = RIGHT.to(dtype)
        self._writes = {"right": all_of_it, "wrong": wrong}
        self._form = form
        self.memory = self.right.clone()

    def expected(self) -> Any:
        return self._form(self.right.clone())

    def run(self, way: str, out: torch.Tensor | None = None) -> Any:
        ExactTime.pass_ms(5.0 if way == "right" else 1.0)
        out = self.memory if out is None else out
        self._writes[way](out, self.right)
        return self._form(out)


@pytest.mark.parametrize(("wrong", "form", "dtype"), CASES)
def test_one_run_is_checked(wrong: Write, form: Form, dtype: torch.dtype):
    """A script that times one run gets an error instead of a time."""
    kernel = Kernel(wrong, form, dtype)
    assert benchmark_config(lambda: kernel.run("right"), kernel.expected(), num_iters=1) > 0
    with pytest.raises(AssertionError, match=r"NaN|wrong by|not written"):
        benchmark_config(lambda: kernel.run("wrong"), kernel.expected(), num_iters=1)


def configs_of(kernel: Kernel) -> Any:
    """The kernel as a function with a right config and a wrong one, which is quicker."""
    memory = kernel.memory  # captured, and of no object that peers might know

    @autotune([{"way": "right"}, {"way": "wrong"}], None, check=matches(lambda x: kernel.expected()), **QUICK)
    def function(x: torch.Tensor, way: str) -> Any:
        return kernel.run(way, memory)

    return function


@pytest.mark.parametrize(("wrong", "form", "dtype"), CASES)
def test_a_function_s_configs_are_checked(wrong: Write, form: Form, dtype: torch.dtype):
    """The wrong one is dropped."""
    function = configs_of(Kernel(wrong, form, dtype))
    function(A)
    assert [each.failure is None for each in function.records[-1].candidates] == [True, False]


@pytest.mark.parametrize(("wrong", "form", "dtype"), CASES[::5])
def test_configs_of_a_function_inside_a_tuned_step_are_checked(wrong: Write, form: Form, dtype: torch.dtype):
    """The wrong one is dropped there, too."""
    function = configs_of(Kernel(wrong, form, dtype))
    step = contextual_autotune(**QUICK)(lambda: function(A))
    step()
    assert [each.failure is None for each in step.records[-1].candidates] == [True, False]


@pytest.mark.processes
@pytest.mark.parametrize(("wrong", "form", "dtype"), CASES[::5])
def test_a_script_s_configs_are_checked(wrong: Write, form: Form, dtype: torch.dtype):
    """The quicker config is wrong, and the other one is chosen."""
    kernel = Kernel(wrong, form, dtype)
    space = [{"way": "wrong"}, {"way": "right"}]
    assert tune_kernel(space, lambda config: (lambda: kernel.run(config["way"]), kernel.expected()), num_iters=1) == space[1]
