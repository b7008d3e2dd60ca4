"""``DIST_TUNE_ISOLATE=1``: each new config runs once alone before anything else is done with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.testing import values
from tests.ranks.journaled import BLOCKS, launches, tune, tune_function
from tests.ranks.test_journals import attempt, journals

pytestmark = pytest.mark.once
N = len(BLOCKS)


@pytest.mark.parametrize("n_kernels", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_config_that_ends_its_process_alone_is_in_quarantine_after_one_death(tmp_path: Path, n_kernels: int):
    """The next attempt runs without it, and has no other suspect: each other config is timed in its turn."""
    ends = (32, 1, 0, "exit")
    assert attempt(tmp_path, ends, n_kernels, DIST_TUNE_ISOLATE="1")[1].error == "Died"
    got = values(attempt(tmp_path, ends, n_kernels, DIST_TUNE_ISOLATE="1"))
    assert launches(tmp_path)[32, 1] == 1
    # The first run, the probe, each config alone (the other kernel runs one that is known to), all of them timed, and the last run.
    alone = (N - 1) + N * (n_kernels - 1)
    assert [each["runs"] for each in got] == [2 + alone + N - (n_kernels == 1) + 1] * 2
    for record in got[0]["records"]:
        is_first = record[1].startswith("[64,")
        assert [i for i, each in enumerate(record[3]) if each] == ([BLOCKS.index(32)] if is_first else [])
    (first,) = [each for each in got[0]["records"] if each[1].startswith("[64,")]
    assert "rank 1: quarantined, because the process of rank 1 ended while it ran alone" in first[3][BLOCKS.index(32)]
    assert journals(tmp_path) == []
    assert values(attempt(tmp_path, ends, n_kernels, DIST_TUNE_ISOLATE="1"))[0]["runs"] == 1


@pytest.mark.slow
def test_a_function_s_config_is_isolated_as_well(tmp_path: Path):
    """Its process ends once."""
    ends = (32, 1, 0, "exit")
    assert attempt(tmp_path, ends, function=tune_function, DIST_TUNE_ISOLATE="1")[1].error == "Died"
    got = values(attempt(tmp_path, ends, function=tune_function, DIST_TUNE_ISOLATE="1"))
    assert launches(tmp_path)[32, 1] == 1
    ((_, failures),) = got[0]["records"]
    assert [i for i, each in enumerate(failures) if each] == [BLOCKS.index(32)]


@pytest.mark.slow
def test_one_rank_s_variable_is_enough(tmp_path: Path):
    """Ranks agree on the replays, and are told that their settings differ."""
    got = values(attempt(tmp_path, None, 1, function=on_one_rank))
    assert [each["runs"] for each in got] == [2 + N + N + 1] * 2


def on_one_rank(rank: int, folder: Path, *args: object) -> object:
    pytest.MonkeyPatch().setenv("DIST_TUNE_ISOLATE", str(rank))
    return tune(rank, folder)
