"""A config that returns something wrong, or does not write all of it, is found by each way to tune:
one check serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import autotune, contextual_autotune, matches
from dist_tune.measure import Clock
from dist_tune.offline import tune_kernel
from dist_tune.testing import ExactTime
from tests.steps import QUICK, quiet

A, B = torch.arange(32.0).view(8, 4) / 8, torch.ones(4, 4)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)
    monkeypatch.setattr(Clock, "now", ExactTime.now)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "nothing": lambda out, result: None,
    "half": lambda out, result: out[:4].copy_(result[:4]),
    "all but one": lambda out, result: out.view(-1)[:-1].copy_(result.view(-1)[:-1]),
    "nan": lambda out, result: out.copy_(result)[3, 1].fill_(torch.nan),
    "one off": lambda out, result: out.copy_(result)[5, 2].mul_(2),
    "zeros": lambda out, result: out.zero_(),
}
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda out: out,
    "transposed": lambda out: (torch.ones(3), out.t()),
    "aliases": lambda out: [out, out.view(-1), out[2:]],
    "dict": lambda out: {"out": out.view(-1).view(8, 4), "n": 3},
    "dataclass": make_dataclass("Output", ["value"]),
}
CASES = [
    (write, form)
    for write in WRITES
    for form in FORMS
    if "tensor" in form or write in ("nothing", "one off")
]
"""A result of any form is looked into; what is found there does not depend on its form."""


class Kernel:
    """Writes to memory that holds the right answer already, the same in each call, as an allocator
    gives it.
    """

    def __init__(self, wrong: str, form: str) -> None:
        self.right, self.memory = A @ B, A @ B
        self.writes, self.form = {"right": torch.Tensor.copy_, "wrong": WRITES[wrong]}, FORMS[form]

    def expected(self) -> Any:
        return self.form(self.right.clone())

    def run(self, way: str, out: torch.Tensor) -> Any:
        ExactTime.pass_ms(5.0 if way == "right" else 1.0)
        self.writes[way](out, self.right)
        return self.form(out)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize(("wrong", "form"), CASES)
def test_a_function_s_configs_are_checked(wrong: str, form: str, is_inside: bool):
    """The wrong one is dropped, which is quicker, also inside a tuned step."""
    kernel = Kernel(wrong, form)
    memory = kernel.memory  # captured, and of no object that peers might know

    @autotune(
        [{"way": "right"}, {"way": "wrong"}],
        None,
        check=matches(lambda x: kernel.expected()),
        **QUICK,
    )
    def function(x: torch.Tensor, way: str) -> Any:
        return kernel.run(way, memory)

    tuned: Any = contextual_autotune(**QUICK)(lambda x: function(x)) if is_inside else function
    tuned(A)
    assert [each.failure is None for each in tuned.records[-1].candidates] == [True, False]


@pytest.mark.processes
@pytest.mark.parametrize(("wrong", "form"), CASES)
def test_a_script_s_configs_are_checked(wrong: str, form: str):
    """The quicker config is wrong, and the other one is chosen."""
    kernel = Kernel(wrong, form)
    space = [{"way": "wrong"}, {"way": "right"}]
    assert (
        tune_kernel(
            space,
            lambda config: (lambda: kernel.run(config["way"], kernel.memory), kernel.expected()),
            num_iters=1,
        )
        == space[1]
    )


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_generator_that_a_function_is_given_ends_as_after_one_call(is_checked: bool):
    """The value is drawn from the same numbers as without a tuning, and no config is dropped
    because its reference has drawn, too.
    """

    def drawn(a: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return a * torch.rand(a.shape, generator=generator)

    @autotune([{"way": 0}, {"way": 1}], key=[], check=drawn if is_checked else None)
    def function(a: torch.Tensor, generator: torch.Generator, way: int = 0) -> torch.Tensor:
        return drawn(a, generator)

    plain, tuned = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(2):
        assert torch.equal(function(A, tuned), drawn(A, plain))
    assert torch.equal(torch.rand(1, generator=tuned), torch.rand(1, generator=plain))
    # Without a check it is not called again, because the generator is used up by a run.
    assert [each.failure for record in function.records[-1:] for each in record.candidates] == [
        None,
        None,
    ] * is_checked
