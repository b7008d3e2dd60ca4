"""``make=``: a config that never returns is dropped, groups and closure are made anew, and the call goes on."""

from __future__ import annotations

from typing import Any

import pytest

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.anew import device_waits, factory_fails, goes_on, hangs_between_launches
from tests.ranks.stuck import BLOCKS
from tests.ranks.test_watchdog import left_with
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


@pytest.mark.parametrize("how", ["loop", pytest.param("sleep", marks=pytest.mark.slow), pytest.param("event", marks=pytest.mark.slow)])
def test_a_call_goes_on_with_new_groups_after_a_config_that_never_returned(how: str):
    """Rank 0 waits in the all-reduce; both get new groups, the config is dropped on both, and nothing measured is measured again."""
    got: list[Any] = values(on_ranks(2, goes_on, how, 2, False, {}, env={"DIST_TUNE_DEADLINE_S": "2"}, timeout_s=60))
    for n_made, y, x, again, best, failures, launches, steady, left in got:
        assert (n_made, y, x, again) == (2, 2.0, 0.0, 4.0)
        assert [each is None for each in failures] == [True, True, False, True]
        assert "rank 1: it never returned, and was interrupted: " in failures[2]
        assert "BLOCK=64" in failures[2]
        assert "(race)" in failures[2]
        # Two samples of each config, one of them the hang; the first run, twice; and the last.
        assert len(launches) == 2 * len(BLOCKS) + 3
        assert [launches.count(i) for i in (2, 3)] == [2, 2 + (best == [128])]
        assert len(steady) == 1
        assert left == []
    assert got[0][4] == got[1][4] != [64]


@pytest.mark.slow
@pytest.mark.parametrize(("at_launch", "in_place", "uses_cache"), [(1, True, True), (2, True, False), (1, False, False)])
def test_the_first_run_of_a_step_that_acts_in_place_counts_once(at_launch: int, in_place: bool, uses_cache: bool):
    """Its value and its state are the call's, whether the hang comes in the second run or later; without a cache samples are lost."""
    got: list[Any] = values(on_ranks(2, goes_on, "loop", at_launch, in_place, {"cache": uses_cache}, timeout_s=60))
    for n_made, y, x, again, best, failures, launches, _, left in got:
        assert (n_made, y, x, again) == (2, 2.0, 1.0 if in_place else 0.0, 4.0)
        assert [each is None for each in failures] == [True, True, False, True]
        assert launches.count(2) == at_launch
        assert best != [64]
        assert left == []


@pytest.mark.slow
def test_a_winner_that_hangs_in_the_last_run_is_dropped():
    """It had its place on the kernel by then, which the next attempt takes back; samples of the others count."""
    for n_made, y, _, again, best, failures, launches, _, _ in values(on_ranks(2, goes_on, "loop", 3, False, {}, True, timeout_s=60)):
        assert (n_made, y, again) == (2, 2.0, 4.0)
        assert [each is None for each in failures] == [True, True, False, True]
        assert "(last run)" in failures[2]
        assert best != [64]
        assert len(launches) == 2 * len(BLOCKS) + 4


def test_a_device_that_waits_in_a_collective_is_freed():
    """Not the host but the device waits, as with NCCL: groups are aborted, and the call goes on without the config."""
    ((state, n_made, y, x, again, best, failures, _, _, left),) = values(on_ranks(1, device_waits, env={"DIST_TUNE_DEADLINE_S": "1"}))
    assert state == {"n_aborted": 1}
    assert (n_made, y, x, again) == (2, 1.0, 0.0, 2.0)
    assert [each is None for each in failures] == [True, True, False, True]
    assert "the device's replay" in failures[2]
    assert best != [64]
    assert left == []


@pytest.mark.slow
def test_of_several_configs_under_way_the_one_that_hangs_is_found():
    """Neither is dropped at first: both are suspects, which run alone, and the one that hangs again is in quarantine."""
    got: list[Any] = values(on_ranks(2, hangs_between_launches, env={"DIST_TUNE_DEADLINE_S": "2"}, timeout_s=60))
    for n_made, y, runs in got:
        assert n_made == 3
        assert y == 4.0
        assert sorted(runs) == [[True, False, True], [True, True, True]]


@pytest.mark.slow
def test_without_its_make_on_a_rank_that_cannot_be_freed_all_leave():
    """A hang in C with the interpreter lock: rank 1 is ended by faulthandler's timer, and rank 0 raises with the reason."""
    first, second = on_ranks(2, goes_on, "locked", 1, False, {}, timeout_s=60)
    assert second.error == "Died"
    assert first.error == "AbsentRanksError", f"{first.error}: {first.message}"


@pytest.mark.slow  # tests/watch/test_making.py has the decision
def test_a_factory_that_fails_on_one_rank_strands_no_other():
    """Rank 0 is in ``new_group`` then, which nothing ends: it leaves a deadline later, with the reason in its log."""
    first, second = on_ranks(2, factory_fails, env={"DIST_TUNE_DEADLINE_S": "2"}, timeout_s=30)
    assert (second.error, second.message) == ("ValueError", "no groups left")
    left_with(first, 86)
    assert "make() of rank 1 raised ValueError: no groups left" in first.log


def test_make_needs_ranks_that_decide_together():
    """A process alone has no groups; and a factory is a function."""
    with pytest.raises(ValueError, match="make= is given but is_dist is False"):
        contextual_autotune(make=lambda: print)
    with pytest.raises(TypeError, match="make"):
        contextual_autotune(is_dist=True, make=1)(print)  # type: ignore[arg-type]
