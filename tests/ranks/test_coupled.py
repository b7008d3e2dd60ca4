"""``coupled=True``: a candidate is dropped on all ranks before its launch, or all ranks launch it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_tune.testing import on_ranks, values
from tests.ranks.coupled import BLOCKS, tune, tune_apart, tune_compiled, tune_from_caches, tune_twice

pytestmark = [pytest.mark.processes, pytest.mark.once]


def same_on_all(found: list[list[Any]]) -> list[Any]:
    """What the ranks found, which is the same on all."""
    assert all(each == found[0] for each in found), found
    return found[0]


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_rank_launches_a_config_that_another_one_cannot(tmp_path: Path, n_ranks: int):
    """Flags count tiles. Each config fails on one rank in its turn, before its launch or in it; the first run begins with one of them."""
    cases: list[dict[str, Any]] = [{"fails": (block, "fit")} for block in BLOCKS]
    cases += [{"fails": (16, "hook"), "rank": 0}, {"fails": (32, "end")}, {"fails": (16, "fit"), "has_mark": True}]
    for case, (blocks, winner, failed, is_right, left) in zip(
        cases, same_on_all(values(on_ranks(n_ranks, tune, tmp_path, cases))), strict=True
    ):
        bad, way = case["fails"]
        assert failed == [bad]
        assert winner != bad
        assert is_right
        assert left == [0] * n_ranks
        assert set(blocks) == set(BLOCKS) - ({bad} if way != "end" else set())
        assert way != "end" or blocks.count(bad) == 1


def test_a_config_that_one_rank_has_already_is_launched_by_all_or_by_none(tmp_path: Path):
    """Rank 0 has a config for the kernel from elsewhere: no rank launches it while the others launch another.

    What they have agreed on is launched in a call that is new to rank 1 alone, too: the other one comes to no meeting there.
    """
    (known,) = same_on_all(values(on_ranks(2, tune, tmp_path, [{"known": 32}], timeout_s=45.0)))
    assert known[2:] == ([], True, [0, 0])


def test_a_rank_without_the_record_launches_what_the_others_recall(tmp_path: Path):
    """Rank 1 has an empty cache: it takes rank 0's record; where that config does not fit it, all tune without it."""
    first, recalled, anew = same_on_all(values(on_ranks(2, tune_from_caches, tmp_path)))
    assert (recalled[1], recalled[2]) == (first[1], True)
    assert not anew[2]
    assert anew[1] != first[1]
    assert first[1] not in anew[0]


def test_a_config_that_does_not_fit_one_rank_s_device_is_launched_on_none():
    """Real compilation; rank 1 has no shared memory, and so not the config that compiles fastest."""
    warps, failed = same_on_all(values(on_ranks(2, tune_compiled, 0, mode="fake")))
    assert failed == [True, True, False]
    assert set(warps) == {1}


def test_a_launch_that_would_compile_on_one_rank_has_no_stand_in_there():
    """An argument of rank 1 counts up: its other kernels are loaded for the config that the other rank launches."""
    warps, failed = same_on_all(values(on_ranks(2, tune_compiled, None, mode="fake")))
    assert failed == [False] * 3
    assert set(warps) == {1, 2, 4}


def test_ranks_whose_keys_of_a_coupled_kernel_differ_are_told(tmp_path: Path):
    """Sites with other keys would win with other configs: an error on all ranks, before a launch."""
    for outcome in on_ranks(2, tune_apart, tmp_path):
        assert outcome.error == "RankMismatchError"
        assert "coupled kernels: rank 0 is at tests.ranks.coupled.counting_kernel[64," in outcome.message
        assert "key=" in outcome.message


def test_after_a_tuning_that_was_cut_off_ranks_go_on_with_the_same_config(tmp_path: Path):
    """Only the journal of rank 1 bars the config with which the first run would begin; samples of both are kept."""
    first, after, n_runs, is_right, left = same_on_all(values(on_ranks(2, tune_twice, tmp_path)))
    assert len(first) == 7
    assert 16 not in [*first, *after]
    assert n_runs < 1 + 2 + 8 + 1  # the first run, each config alone, four times each, and the last run
    assert is_right
    assert left == [0, 0]
