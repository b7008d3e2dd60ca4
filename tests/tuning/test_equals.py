"""Equal candidates: found on each rank, and agreed on."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search import Plan, PriorTimes, Race, Times
from dist_tune.tuning.compilation import equal_on_all, first_equals

pytestmark = pytest.mark.once


def config(block: int = 16, **options: Any) -> triton.Config:
    return triton.Config({"BLOCK": block}, **options)


def times(ms: float) -> Times:
    return Times(kernel_ms=ms, closure_ms=ms, rank_latencies_ms={0: ms})


def test_same_kernel_and_config_but_for_stages():
    """Another constant, number of warps or hook makes another launch of the same code; unknown kernels are equal to none."""
    staged = [config(num_stages=stages) for stages in (1, 2, 3)]
    assert first_equals(staged, ["k", "k", "k"]) == [0, 0, 0]
    assert first_equals(staged, ["k", "l", "k"]) == [0, 1, 0]
    assert first_equals(staged, ["", "", ""]) == []
    others = [config(16), config(32), config(16, num_warps=8), config(16, maxnreg=64), config(16, num_ctas=2)]
    assert first_equals(others, ["k"] * 5) == []

    def hook(args: dict[str, Any]) -> None:
        """Handed the number of stages."""

    assert first_equals([config(num_stages=stages, pre_hook=hook) for stages in (1, 2)], ["k", "k"]) == []


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3))
def test_equal_on_all_ranks_are_those_that_each_has_found_equal(classes: list[list[int]]):
    """For any classes on any ranks; the first of them stands for the others and for itself."""
    rows = [[row.index(kernel) for kernel in row] for row in classes]
    equal = equal_on_all(rows)
    first = [equal.get(i, i) for i in range(4)]
    for i in range(4):
        assert first[i] == min(j for j in range(4) if all(row[i] == row[j] for row in rows))
    assert equal_on_all([*rows, []]) == {}


def race(equal: dict[int, int], prior: PriorTimes | None = None, failures: dict[int, str] | None = None) -> Race:
    found = Race(Plan(n_warmup=0, n_repeat=1))
    found.add("s", 4, failures or {}, prior, equal)
    return found


def raced(found: Race) -> list[int]:
    return sorted(each["s"].candidate for each in found.batch() if each["s"].is_timed)


def test_an_equal_candidate_does_not_race_and_has_the_times_of_the_other():
    """Two kernels of four candidates."""
    found = race({1: 0, 3: 2})
    assert raced(found) == [0, 2]
    found["s"].tell(0, {0: times(1.0), 2: times(2.0)})
    results = found["s"].results()
    assert [each.equal_to for each in results] == [None, 0, None, 2]
    assert [each.times.kernel_ms for each in results if each.times] == [1.0, 1.0, 2.0, 2.0]
    assert found["s"].best == 0


def test_equals_of_a_failure_fail():
    """In the race, with the first one's reason; the other kernel wins, never an equal of the failed one."""
    found = race({1: 0, 3: 2})
    found["s"].drop({0: "rank 1: too slow"})
    assert [each.failure for each in found["s"].results()] == [
        "rank 1: too slow",
        "the same kernel as candidate 0: rank 1: too slow",
        None,
        None,
    ]
    assert found["s"].best == 2


def test_one_kernel_leaves_nothing_to_race():
    found = race({1: 0, 3: 0}, failures={2: "does not compile"})
    assert found.batch() == []
    assert found["s"].best == 0


def test_times_of_an_earlier_tuning_count_for_the_one_that_races():
    """Its winner was candidate 1, which now is equal to candidate 0."""
    found = race({1: 0}, PriorTimes({1: times(1.0), 2: times(9.0)}, winner=1))
    assert raced(found) == [0, 3]
    assert found["s"].results()[2].left == "not raced: slower in an earlier tuning"
    assert found["s"].best == 0
