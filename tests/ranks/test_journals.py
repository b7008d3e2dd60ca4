"""Tunings that are cut off: what all ranks have measured counts, and what ended a process runs last and alone, or not at all."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.cases import further
from tests.ranks.journaled import BLOCKS, launches, tune, tune_function, tune_in
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once
N = len(BLOCKS)


def attempt(folder: Path, *args: Any, function: Any = tune, **env: str) -> Any:
    """One start of the job, on two ranks with one cache."""
    return on_ranks(2, function, folder, *args, env={"DIST_TUNE_CACHE_DIR": str(folder / "cache"), **env})


def journals(folder: Path) -> list[Path]:
    """The journals that lie in the cache folder."""
    return sorted((folder / "cache" / "journals").glob("*.jsonl"))


def events(path: Path, kind: str) -> list[Any]:
    """The lines of one kind in a journal."""
    lines = [json.loads(line.partition(" ")[2]) for line in path.read_text().splitlines()]
    return [line for line in lines if line["t"] == kind]


@pytest.mark.parametrize("n_kernels", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_tuning_goes_on_where_it_was(tmp_path: Path, rank: int, n_kernels: int):
    """A rank is killed in the sixth run: four timed ones count, and the job needs a first run, the probe, two replays and a last run."""
    ends = (0, rank, 6, "once")
    assert attempt(tmp_path, ends, n_kernels)[rank].error == "Died"
    assert [len(events(path, "measured")) for path in journals(tmp_path)] == [4, 4]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in journals(tmp_path))
    assert (tmp_path / "cache" / "journals").stat().st_mode & 0o777 == 0o700
    got = values(attempt(tmp_path, ends, n_kernels))
    # Where there are two kernels, the config under way is timed alone, and so is the other kernel's that was under way with it.
    assert [each["runs"] for each in got] == [N - 4 + 3 + (n_kernels == 2)] * 2
    assert got[0]["best"] == got[1]["best"]
    assert [each[3] for each in got[0]["records"]] == [[None] * N] * n_kernels
    assert journals(tmp_path) == []
    assert all(each[4] for each in values(attempt(tmp_path, ends, n_kernels))[0]["records"])


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
    assert got[0]["runs"] <= 2 + n_kernels
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


def test_an_exception_of_the_user_casts_no_suspicion_and_costs_no_replay(tmp_path: Path):
    """Raised on one rank in the middle, twice with the same config under way."""
    for _ in range(2):
        outcomes = attempt(tmp_path, None, 1, (6, 1))
        assert outcomes[1].error == "ValueError", outcomes[1]
    assert not (tmp_path / "cache" / "quarantine").exists()
    told = launches(tmp_path)
    n_measured = min(sum(n for (_, r), n in told.items() if r == rank) for rank in range(2)) - 4  # without first runs and probes
    got = values(attempt(tmp_path))
    assert n_measured > 0
    assert got[0]["runs"] <= N - n_measured + 3  # a rank that was behind has measured less, and the shorter journal counts
    assert got[0]["records"][0][3] == [None] * N


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path):
    """On one rank; the other hears of it."""
    outcomes = attempt(tmp_path, None, 1, (6, 1), (("budget_s", 1000.0),))
    assert outcomes[1].error == "KeyboardInterrupt", outcomes[1]
    assert values(attempt(tmp_path))[0]["runs"] == N - 3 + 3


def test_an_exception_in_the_last_run_loses_no_finished_tuning(tmp_path: Path):
    """The next process times nothing: it makes a first run, the probe and a last one."""
    outcomes = attempt(tmp_path, None, 1, (N + 3, 1))
    assert outcomes[1].error == "ValueError", outcomes[1]
    got = values(attempt(tmp_path))
    assert got[0]["runs"] == 3
    assert got[0]["records"][0][3] == [None] * N
    assert journals(tmp_path) == []


def test_a_rank_without_its_journal_lets_all_begin_anew(tmp_path: Path):
    """On all ranks or on none."""
    ends = (0, 1, 6, "once")
    attempt(tmp_path, ends)
    journals(tmp_path)[0].unlink()
    got = values(attempt(tmp_path, ends))
    assert [each["runs"] for each in got] == [N + 3] * 2
    assert got[0]["best"] == got[1]["best"]


@pytest.mark.parametrize("damage", ["torn", "noise", *map(further, ["types", "fifo", "folder"])])
def test_a_damaged_journal_costs_a_warning_at_most(tmp_path: Path, damage: str):
    """What cannot be read is measured again; a fifo is not waited for."""
    ends = (0, 1, 6, "once")
    attempt(tmp_path, ends)
    for path in journals(tmp_path):
        if damage == "torn":
            path.write_bytes(path.read_bytes()[:-20])
        elif damage == "noise":
            path.write_bytes(os.urandom(5000))
        elif damage == "types":
            lines = [b'{"t":"measured","n":[1],"on":{"x":-1},"ms":NaN}', b'{"t":"begun"}', b'{"t":"measured","n":[]}', b"[]", b'{"t":7}']
            path.write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(each), each) for each in lines) + path.read_bytes())
        else:
            path.unlink()
            os.mkfifo(path) if damage == "fifo" else path.mkdir()
    got = values(attempt(tmp_path, ends))
    assert got[0]["best"] == got[1]["best"]
    assert got[0]["runs"] == (N + 3 if damage in ("noise", "fifo", "folder") else N - 4 + 3)


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
def test_a_signal_keeps_what_was_measured_and_leaves_nothing_behind(tmp_path: Path, how: str):
    """As a scheduler, torchrun or Ctrl-C ends a rank: the next attempt goes on, and neither journals nor temporary files are left."""
    ends, env = (0, 1, 6, how), {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "tmp").mkdir()
    assert on_ranks(2, tune_in, tmp_path, ends, mode="fake", env=env)[1].error == {"term": "Died", "int": "KeyboardInterrupt"}[how]
    assert [len(events(path, "measured")) for path in journals(tmp_path)] == [4, 4]
    got = values(on_ranks(2, tune_in, tmp_path, ends, mode="fake", env=env))
    assert got[0]["runs"] == N - 4 + 3
    assert journals(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow  # on a busy machine a race may end with one finalist
def test_the_finals_go_on_where_they_were(tmp_path: Path):
    """Killed in the finals of a race: what had left the race does not run again."""
    options = (("search", "racing"), ("n_repeat", 4))
    ends = (0, 1, 6, "finals")
    assert attempt(tmp_path, ends, 1, (), options)[1].error == "Died"
    before = launches(tmp_path)
    assert all(sum(each["is_final"] for each in events(path, "measured")) >= 3 for path in journals(tmp_path))
    (suspect,) = events(journals(tmp_path)[0], "begun")[-1]["on"].values()
    got = values(attempt(tmp_path, ends, 1, (), options))
    assert got[0]["best"] == got[1]["best"]
    (record,) = got[0]["records"]
    left = [i for i, each in enumerate(record[5]) if each and each.startswith("left the race") and i != suspect]
    assert left
    after = launches(tmp_path)
    first = {BLOCKS[0], *got[0]["best"][0]}
    assert [BLOCKS[i] for i in left if BLOCKS[i] not in first and after[BLOCKS[i], 0] > before[BLOCKS[i], 0]] == []


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
