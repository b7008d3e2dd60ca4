"""Functions that draw random numbers, beside references that draw the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_tune import autotune
from dist_tune.measure.checks import Checker
from tests.checked_runs import A, judge, run

pytestmark = pytest.mark.once


@pytest.mark.parametrize("out", [(), (torch.empty(8, 16),)], ids=["new", "out"])
def test_a_function_that_draws_random_numbers_is_compared_with_a_reference_that_draws_them(out: tuple[torch.Tensor, ...]):
    """Each run starts from where the reference did, also after other draws in between, and leaves the generators behind it."""

    def function(a: torch.Tensor, *out: torch.Tensor) -> torch.Tensor:
        result = torch.nn.functional.dropout(a)
        return out[0].copy_(result) if out else result

    def without_writing(a: torch.Tensor, *out: torch.Tensor) -> torch.Tensor:
        return out[0] if out else torch.empty_like(a)

    checker = Checker(lambda a, *out: torch.nn.functional.dropout(a), function)
    for candidate, is_right in ((function, True), (without_writing, False), (function, True)):
        assert (judge(checker, candidate, A, *out) == "") == is_right
    torch.manual_seed(3)
    function(A)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert run(Checker(lambda a, *out: torch.nn.functional.dropout(a), function), function, A, *out) == ""
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_generator_that_a_function_is_given_ends_as_after_one_call(is_checked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The value is drawn from the same numbers as without a tuning, and no config is dropped because its reference has drawn, too."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))

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
    assert [each.failure for record in function.records[-1:] for each in record.candidates] == [None, None] * is_checked
