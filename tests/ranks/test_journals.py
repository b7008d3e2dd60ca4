"""Tunings that are cut off: what all ranks have measured counts, and what ended a process runs last and alone, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.cases import further
from tests.faults.jobs import run
from tests.ranks.journaled import BLOCKS, launches, tune, tune_function, tune_in, tune_nested
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once
N = len(BLOCKS)
RACING = (("search", "racing"), ("n_repeat", 4))


def attempt(folder: Path, *args: Any, function: Any = tune, **env: str) -> Any:
    """One start of the job, on two ranks with one cache."""
    return on_ranks(2, function, folder, *args, env={"DIST_TUNE_CACHE_DIR": str(folder / "cache"), **env})


def journals(folder: Path) -> list[Path]:
    """The journals that lie in the cache folder."""
    return sorted((folder / "cache" / "journals").glob("*.jsonl"))


def events(path: Path, kind: str) -> list[Any]:
    """The lines of one kind in a journal."""
    return [event for line in path.read_text().splitlines() if line[:1] == "{" and (event := json.loads(line))["kind"] == kind]


@pytest.mark.parametrize("n_kernels", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_tuning_goes_on_from_what_ranks_had_agreed_on(tmp_path: Path, rank: int, n_kernels: int):
    """A rank is killed after the first rung: what was hopeless there does not race again, and all of it costs no more than a new start."""
    (tmp_path / "clean").mkdir()
    n_clean = values(attempt(tmp_path / "clean", None, n_kernels, (), RACING))[0]["runs"]
    ends = (0, rank, -1, "once")
    assert attempt(tmp_path, ends, n_kernels, (), RACING)[rank].error == "Died"
    assert all(len(events(path, "agreed")) >= n_kernels for path in journals(tmp_path))
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in journals(tmp_path))
    assert (tmp_path / "cache" / "journals").stat().st_mode & 0o777 == 0o700
    before = launches(tmp_path)
    got = values(attempt(tmp_path, ends, n_kernels, (), RACING))
    after = launches(tmp_path)
    assert got[0]["runs"] == got[1]["runs"] <= n_clean
    assert got[0]["best"] == got[1]["best"]
    assert [each[3] for each in got[0]["records"]] == [[None] * N] * n_kernels
    assert [block for block in BLOCKS if after[block, 0] == before[block, 0]]
    assert journals(tmp_path) == []
    assert all(each[4] for each in values(attempt(tmp_path, ends, n_kernels, (), RACING))[0]["records"])


@pytest.mark.parametrize(
    ("block", "n_kernels"), [pytest.param(8, 1, marks=pytest.mark.slow), pytest.param(32, 1, marks=pytest.mark.slow), (32, 2)]
)
def test_a_config_that_ends_its_process_is_in_quarantine_after_two_deaths(tmp_path: Path, block: int, n_kernels: int):
    """Also the config that the first run would take. The second time it runs after all others; then the tuning ends without it."""
    ends = (block, 1, 0, "exit")
    assert attempt(tmp_path, ends, n_kernels)[1].error == "Died"
    before = launches(tmp_path)
    assert attempt(tmp_path, ends, n_kernels)[1].error == "Died"
    assert all(launches(tmp_path)[each, 1] for each in BLOCKS), before
    got = values(attempt(tmp_path, ends, n_kernels))
    assert launches(tmp_path)[block, 1] == 2
    # The other kernel's config that was under way with it at the first death is a suspect, too, and has its turn.
    assert got[0]["runs"] <= N + 3 + n_kernels - 1
    assert got[0]["best"][0] != [block]
    (record,) = [each for each in got[0]["records"] if each[1].startswith("[64,")]
    assert "rank 1: quarantined" in record[3][BLOCKS.index(block)]
    assert [i for i, each in enumerate(record[3]) if each] == [BLOCKS.index(block)]
    assert launches(tmp_path)[block, 1] == 2
    assert journals(tmp_path) == []
    assert len(list((tmp_path / "cache" / "quarantine").glob("*.jsonl"))) == 1


def test_a_function_s_config_that_ends_its_process_is_in_quarantine_after_two_deaths(tmp_path: Path):
    """It dies in its untimed run, before anything is timed."""
    ends = (32, 1, 0, "exit")
    for _ in range(2):
        assert attempt(tmp_path, ends, function=tune_function)[1].error == "Died"
    got = values(attempt(tmp_path, ends, function=tune_function))
    assert launches(tmp_path)[32, 1] == 2
    assert "rank 1: quarantined" in got[0]["records"][0][1][BLOCKS.index(32)]


def test_a_config_that_ends_its_process_after_a_kernel_inside_it_is_in_quarantine_after_two_deaths(tmp_path: Path):
    """The kernel that has run inside a function does not clear the function around it."""
    for _ in range(2):
        assert "Died" in [each.error for each in attempt(tmp_path, function=tune_nested)]
    first, _ = values(attempt(tmp_path, function=tune_nested))
    assert first["y"] == 2.0
    assert [failures for failures in first["failures"] if "quarantined" in str(failures[0]) and failures[1:] == [None]]


@pytest.mark.parametrize("function", [tune, tune_function])
def test_deaths_of_a_config_add_up_over_ranks(tmp_path: Path, function: Any):
    """Rank 0 dies in the first attempt, rank 1 in the second: the third one does without the config. Each rank counted for itself."""
    for rank in range(2):
        outcomes = attempt(tmp_path, (32, -1, 0, "turns"), function=function)
        assert outcomes[rank].error == "Died"
    (first, *_), _ = (each["records"] for each in values(attempt(tmp_path, (32, -1, 0, "turns"), function=function)))
    failures = first[3] if function is tune else first[1]
    assert "the process of rank 1" in failures[BLOCKS.index(32)]
    assert [i for i, each in enumerate(failures) if each] == [BLOCKS.index(32)]


@pytest.mark.parametrize("options", [(), (("budget_s", 1000.0),)], ids=["exception", "Ctrl-C"])
def test_an_exception_of_the_user_casts_no_suspicion(tmp_path: Path, options: Any):
    """Raised on one rank in the middle, twice with the same config under way."""
    for _ in range(2):
        outcomes = attempt(tmp_path, None, 1, (6, 1), options)
        assert outcomes[1].error == ("KeyboardInterrupt" if options else "ValueError"), outcomes[1]
    assert all(events(path, "under way")[-1]["candidates"] == [] for path in journals(tmp_path))
    got = values(attempt(tmp_path))
    assert not (tmp_path / "cache" / "quarantine").exists()
    assert got[0]["runs"] <= N + 3
    assert got[0]["records"][0][3] == [None] * N


def test_an_exception_in_the_last_run_loses_no_finished_tuning(tmp_path: Path):
    """The records are there before it: the next call, in this process or another, has the configs."""
    outcomes = attempt(tmp_path, None, 1, (N + 3, 1))
    assert outcomes[1].error == "ValueError", outcomes[1]
    assert journals(tmp_path) == []
    got = values(attempt(tmp_path))
    assert got[0]["runs"] == 1
    assert got[0]["records"][0][3:5] == ([None] * N, True)


@pytest.mark.parametrize("damage", ["gone", "torn", "noise", *map(further, ["fifo", "folder"])])
def test_a_damaged_journal_costs_a_warning_at_most(tmp_path: Path, damage: str):
    """What cannot be read is measured again; a fifo is not waited for."""
    ends = (0, 1, -1, "once")
    attempt(tmp_path, ends, 1, (), RACING)
    for path in journals(tmp_path):
        if damage == "torn":
            path.write_bytes(path.read_bytes()[:-20])
        elif damage == "noise":
            path.write_bytes(os.urandom(5000))
        else:
            path.unlink()
            os.mkfifo(path) if damage == "fifo" else path.mkdir() if damage == "folder" else None
    before = launches(tmp_path)
    got = values(attempt(tmp_path, ends, 1, (), RACING))
    after = launches(tmp_path)
    assert got[0]["best"] == got[1]["best"]
    assert any(after[block, 0] == before[block, 0] for block in BLOCKS) == (damage == "torn")


def test_times_of_replays_after_a_skipped_collective_are_not_kept(tmp_path: Path):
    """Ranks agree on none before they know of it."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache"), "DIST_TUNE_DEADLINE_S": "3"}
    assert all(each.error for each in on_ranks(2, run, "race", "skip collective", env=env))
    assert [events(path, "agreed") for path in journals(tmp_path)] == [[], []]


def test_without_a_cache_there_is_no_journal(tmp_path: Path):
    """And nothing is gone on from."""
    assert attempt(tmp_path, (0, 1, 6, "once"), 1, (), (("cache", False),))[1].error == "Died"
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_costs_the_journal_only(tmp_path: Path):
    """A file lies where the folder should be: all is tuned, and the record kept."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "journals").write_text("mine")
    got = values(attempt(tmp_path))
    assert got[0]["runs"] == N + 3
    assert all(each[4] for each in values(attempt(tmp_path))[0]["records"])


@pytest.mark.parametrize("how", ["term", pytest.param("int", marks=pytest.mark.slow)])
def test_a_signal_casts_no_suspicion_and_leaves_nothing_behind(tmp_path: Path, how: str):
    """As a scheduler, torchrun or Ctrl-C ends a rank, twice with one config under way: it is neither a suspect nor in quarantine."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "tmp").mkdir()
    for _ in range(2):
        (tmp_path / "died").unlink(missing_ok=True)
        error = on_ranks(2, tune_in, tmp_path, (32, 1, 0, how), mode="fake", env=env)[1].error
        assert error == {"term": "Died", "int": "KeyboardInterrupt"}[how]
    got = values(on_ranks(2, tune_in, tmp_path, (32, 1, 0, how), mode="fake", env=env))
    assert got[0]["runs"] == N + 3
    assert got[0]["records"][0][3] == [None] * N
    assert journals(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def _all_deadly(rank: int) -> Any:
    kernel = autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=lambda _: os._exit(7)) for block in (16, 32)])
    contextual_autotune(n_repeat=1, n_warmup=0)(lambda x: launch(kernel, x))(torch.zeros(64))


def test_a_kernel_whose_configs_are_all_in_quarantine_is_named_with_what_to_do(tmp_path: Path):
    """Each has ended its process twice: an error says so in their place, and how they may run again."""
    for _ in range(6):
        (only,) = on_ranks(1, _all_deadly, env={"DIST_TUNE_CACHE_DIR": str(tmp_path)}, is_dist=False)
        if only.error != "Died":
            break
    assert only.error == "NoValidConfigError", f"{only.error}: {only.message}\n{only.notes}"
    assert "add_kernel[64" in only.message
    assert "quarantined" in only.message
    assert "dist-tune cache clear --quarantine" in only.message
