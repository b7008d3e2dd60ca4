"""What a plan takes."""

from typing import Any

import pytest

from dist_tune.search.plan import Plan

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), *[(each, TypeError) for each in (True, False, 2.0, "3", None)]])
@pytest.mark.parametrize("name", ["n_warmup", "n_repeat"])
def test_a_plan_takes_counts_only(name: str, value: Any, error: type[Exception]):
    """A bool is an int to Python, and a mistake here; no warmup is a choice, no repeat is not."""
    with pytest.raises(error, match=rf"{name}.* got {value!r}"):
        Plan(**{name: value})
    assert Plan(n_warmup=0, n_repeat=1) == Plan(0, 1)
    with pytest.raises(ValueError, match="n_repeat >= 1, got 0"):
        Plan(3, 0)


@pytest.mark.parametrize("name", ["search", "objective"])
def test_a_name_that_is_not_known_is_told_with_those_that_are(name: str):
    with pytest.raises(ValueError, match=rf"{name} must be one of \('\w+'(, '\w+')+\), got 'fast'"):
        Plan(**{name: "fast"})  # type: ignore[arg-type]


def test_a_plan_reads_as_the_options_that_a_user_wrote():
    """Messages of ranks that came with different options quote it."""
    assert str(Plan(0, 2, budget_s=3.0)) == "n_warmup=0, n_repeat=2, search='racing', objective='closure', budget_s=3.0"
