"""Tunings that are cut off: what all ranks have measured counts, and what ended a process runs last
and alone, or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.faults.jobs import run
from tests.ranks import journaled
from tests.ranks.journaled import BLOCKS, launches, tune
from tests.steps import autotuned, launch, told
from tests.worlds import ROOT, further, on_each_rank, on_fake, on_ranks
from tests.worlds import folder as cache_folder

N = len(BLOCKS)
RACING: Any = {"search": "racing", "n_repeat": 4}


def attempt(folder: Path, start: Any = on_ranks, env: Any = (), **options: Any) -> Any:
    """One start of the job, on two ranks with one cache."""
    env = {"DIST_TUNE_CACHE_DIR": str(folder / "cache"), **dict(env)}
    return start(
        2, journaled.attempt, folder, options, **({"env": env} if start is on_ranks else env)
    )


def journals(folder: Path) -> list[Path]:
    """The journals that lie in the cache folder."""
    return sorted((folder / "cache" / "journals").glob("*.jsonl"))


def events(path: Path, kind: str) -> list[Any]:
    """The lines of one kind in a journal."""
    return [
        event
        for line in path.read_text().splitlines()
        if line[:1] == "{" and (event := json.loads(line))["kind"] == kind
    ]


# -- killed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [further(0), 1])
def test_a_killed_tuning_goes_on_from_what_ranks_had_agreed_on(tmp_path: Path, rank: int):
    """A rank is killed after the first rung: what was hopeless there does not race again."""
    options: Any = {"ends": (0, rank, -1, "once"), "n_kernels": 2, **RACING}
    assert attempt(tmp_path, **options)[rank].error == "Died"
    assert all(len(events(path, "agreed")) >= 2 for path in journals(tmp_path))
    before = launches(tmp_path)
    first, second = values(attempt(tmp_path, **options))
    after = launches(tmp_path)
    assert (first["runs"], first["best"], first["y"]) == (second["runs"], second["best"], 2 * 2.0)
    assert [*first["failures"].values()] == [[None] * N] * 2
    assert [block for block in BLOCKS if after[block, 0] == before[block, 0]]
    assert journals(tmp_path) == []


KILLED: Any = {"ends": (0, 1, -1, "once"), **RACING}


def _go_on(rank: int, folder: Path, damages: list[str]) -> Any:
    went_on = []
    for damage in damages:
        os.environ["DIST_TUNE_CACHE_DIR"] = str(folder / damage)
        before = launches(folder)
        torch.distributed.barrier()
        best = tune(rank, folder, **KILLED)["best"]
        torch.distributed.barrier()
        went_on.append(
            (best, any(launches(folder)[block, 0] == before[block, 0] for block in BLOCKS))
        )
    return went_on


def test_a_damaged_journal_costs_a_warning_at_most(tmp_path: Path):
    """What cannot be read is measured again; a fifo is not waited for."""
    attempt(tmp_path, **KILLED)
    damages = ["torn", "gone", "noise", "fifo", "folder"]
    for damage in damages:
        shutil.copytree(tmp_path / "cache", tmp_path / damage)
        for path in (tmp_path / damage / "journals").glob("*.jsonl"):
            if damage == "torn":
                path.write_bytes(path.read_bytes()[:-20])
            elif damage == "noise":
                path.write_bytes(os.urandom(5000))
            else:
                path.unlink()
                (
                    os.mkfifo(path)
                    if damage == "fifo"
                    else path.mkdir()
                    if damage == "folder"
                    else None
                )
    first, second = values(on_ranks(2, _go_on, tmp_path, damages))
    assert first == second
    assert [has_gone_on for _, has_gone_on in first] == [True, False, False, False, False]


@pytest.mark.parametrize("how", ["term", further("int")])
def test_a_signal_casts_no_suspicion_and_leaves_nothing_behind(tmp_path: Path, how: str):
    """As a scheduler, torchrun or Ctrl-C ends a rank, twice with one config under way: it is
    neither a suspect nor in quarantine.
    """
    (tmp_path / "tmp").mkdir()
    options: Any = {"ends": (32, 1, 0, how), "tmp": str(tmp_path / "tmp")}
    for _ in range(2):
        (tmp_path / "died-1").unlink(missing_ok=True)
        assert (
            attempt(tmp_path, on_fake, **options)[1].error
            == {"term": "Died", "int": "KeyboardInterrupt"}[how]
        )
    got = values(attempt(tmp_path, on_fake, **options))
    assert (got[0]["runs"], [*got[0]["failures"].values()]) == (N + 3, [[None] * N])
    assert journals(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []


JOB = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from tests.ranks.journaled import tune

if __name__ == "__main__":
    device = sys.argv[3]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    got = tune(dist.get_rank(), Path(sys.argv[1]), ends=tuple(json.loads(sys.argv[2])), device=device)
    Path(sys.argv[1], f"got-{dist.get_rank()}").write_text(json.dumps([got, os.environ["TORCHELASTIC_RESTART_COUNT"]]))
    dist.destroy_process_group()
"""  # noqa: E501


def supervised(folder: Path, ends: Any, device: str = "cpu") -> list[Any]:
    """Run the job on two ranks with ``launch/launch.sh --supervise``; what each rank ended with,
    and after how many restarts.
    """
    (folder / "job.py").write_text(JOB)
    env = {
        **os.environ,
        **({"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if device == "cpu" else {}),
        "DIST_TUNE_CACHE_DIR": str(folder / "cache"),
        "DIST_TUNE_LOG_DIR": str(folder / "logs"),
        "DIST_TUNE_DEADLINE_S": "10",
        "TMPDIR": str(folder),
    }
    command = [
        ROOT / "launch/launch.sh",
        "--supervise",
        "--nproc-per-node=2",
        folder / "job.py",
        folder,
        json.dumps(ends),
        device,
    ]
    done = subprocess.run(
        [*map(str, command)], env=env, capture_output=True, text=True, timeout=150, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"got-{rank}").read_text()) for rank in (0, 1)]


# What launch.sh starts again is in tests/test_launch.py, what a second attempt finds in this file
@pytest.mark.slow
@pytest.mark.parametrize("ends", [(0, 0, 6, "once"), (0, 1, 6, "once"), (32, 1, 0, "exit")])
def test_a_supervised_job_that_loses_a_rank_comes_back(tmp_path: Path, ends: Any):
    """Killed before ranks have agreed on a time: the second attempt is as long as a first one.

    A deadly config is out after two.
    """
    (first, n_restarts), (second, _) = supervised(tmp_path, ends)
    assert (first["best"], first["y"]) == (second["best"], 2.0)
    assert n_restarts == ("1" if ends[3] == "once" else "2")
    (failures,) = first["failures"].values()
    if ends[3] == "once":
        assert first["runs"] == second["runs"] <= N + 3
        assert failures == [None] * N
        assert not list((tmp_path / "cache" / "journals").iterdir())
    else:
        assert launches(tmp_path)[32, 1] == 2
        assert "quarantined" in failures[BLOCKS.index(32)]


# -- quarantine ------------------------------------------------------------------------------------


QUARANTINES = {
    "a kernel": {"ends": (32, 1, 0, "exit"), "n_kernels": 2},
    "the first config": {"ends": (8, 1, 0, "exit")},
    "a function": {"ends": (32, 1, 0, "exit"), "form": "function"},
    "after a kernel in it": {"form": "nested"},
    "a rank each": {"ends": (32, -1, 0, "turns")},
    "a function, a rank each": {"ends": (32, -1, 0, "turns"), "form": "function"},
}
"""What ends its process; on two ranks, deaths add up."""


@pytest.mark.parametrize(
    "case",
    [
        (
            name
            if name in ("a kernel", "a function", "after a kernel in it", "a rank each")
            else further(name)
        )
        for name in QUARANTINES
    ],
)
def test_a_config_that_ends_its_process_is_in_quarantine_after_two_deaths(
    tmp_path: Path, case: str
):
    """The second time it runs after all others; then the tuning ends without it."""
    options: Any = QUARANTINES[case]
    block, by, *_ = options.get("ends", (8, 0))
    for k in range(2):
        assert (
            "Died" in [each.error for each in attempt(tmp_path, **options)][k if by == -1 else 0 :]
        )
    counts = launches(tmp_path)
    first, second = values(attempt(tmp_path, **options))
    assert (first["failures"], first["best"], first["y"]) == (
        second["failures"],
        second["best"],
        2.0 * (1 + (case == "a kernel")),
    )
    (failures,) = [each for each in first["failures"].values() if any(each)]
    assert [i for i, each in enumerate(failures) if each] == [BLOCKS.index(block)]
    assert "quarantined" in failures[BLOCKS.index(block)]
    assert "the process of rank" in failures[BLOCKS.index(block)]
    if "ends" in options:
        assert counts[block, 0] + counts[block, 1] >= 2
        assert [launches(tmp_path)[block, rank] for rank in (0, 1)] == [
            counts[block, 0],
            counts[block, 1],
        ]
        assert case != "a kernel" or all(counts[each, 1] for each in BLOCKS)
        # The other kernel's config that was under way with it at the first death is a suspect, too,
        # and has its turn.
        assert first["runs"] <= N + 3 + options.get("n_kernels", 1) - 1
        assert len(list((tmp_path / "cache" / "quarantine").glob("*.jsonl"))) == 1
    assert journals(tmp_path) == []


def _all_deadly(rank: int) -> Any:
    kernel = autotuned(
        configs=[
            triton.Config({"BLOCK": block}, pre_hook=lambda _: os._exit(7)) for block in (16, 32)
        ]
    )
    contextual_autotune(n_repeat=1, n_warmup=0)(lambda x: launch(kernel, x))(torch.zeros(64))


def test_a_kernel_whose_configs_are_all_in_quarantine_is_named_with_what_to_do(tmp_path: Path):
    """Each has ended its process: an error says so in their place, and how they may run again."""
    for _ in range(6):
        (only,) = on_ranks(
            1, _all_deadly, env={"DIST_TUNE_CACHE_DIR": str(tmp_path)}, is_dist=False
        )
        if only.error != "Died":
            break
    assert only.error == "NoValidConfigError", f"{only.error}: {only.message}\n{only.notes}"
    for words in ("add_kernel[64", "quarantined", "dist-tune cache clear --quarantine"):
        assert words in only.message


# -- what leaves no journal, and no suspicion ------------------------------------------------------


@on_each_rank(cases=[ValueError, KeyboardInterrupt])
def test_an_exception_of_the_user_casts_no_suspicion(rank: int, error: Any):
    """Raised on one rank in the middle, twice with the same config under way."""
    counts = cache_folder().with_name("counts")
    for _ in range(2):
        assert (
            told(lambda: tune(rank, counts, fails=(6, 1, error)))[0]
            == ("PeerFailedError", error.__name__)[rank]
        )
    torch.distributed.barrier()
    assert all(
        events(path, "under way")[-1]["candidates"] == []
        for path in journals(cache_folder().parent)
    )
    got = tune(rank, counts)
    assert got["runs"] <= N + 3
    assert [*got["failures"].values()] == [[None] * N]
    assert not (cache_folder() / "quarantine").exists()


@on_each_rank()
def test_an_exception_in_the_last_run_loses_no_finished_tuning(rank: int):
    """The records are there before it: the next call, in this process or another, has the
    configs.
    """
    counts = cache_folder().with_name("counts")
    assert (
        told(lambda: tune(rank, counts, fails=(N + 3, 1, ValueError)))[0]
        == ("PeerFailedError", "ValueError")[rank]
    )
    got = tune(rank, counts)
    assert (got["runs"], got["is_recalled"]) == (1, True)


@on_each_rank()
def test_without_a_cache_there_is_no_journal(rank: int):
    """And nothing is gone on from."""
    assert (
        told(
            lambda: tune(
                rank, cache_folder().with_name("counts"), fails=(6, 1, ValueError), cache=False
            )
        )[0]
        != ""
    )
    assert not cache_folder().exists()


@on_each_rank()
def test_a_folder_that_cannot_be_written_costs_the_journal_only(rank: int):
    """A file lies where the folder should be: all is tuned, and the record kept."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    (cache_folder() / "journals").write_text("mine")
    torch.distributed.barrier()
    for is_recalled in (False, True):
        got = tune(rank, cache_folder().with_name("counts"))
        assert (got["runs"], got["is_recalled"]) == (1 if is_recalled else N + 3, is_recalled)
        torch.distributed.barrier()


def test_times_of_replays_after_a_skipped_collective_are_not_kept(tmp_path: Path):
    """Ranks agree on none before they know of it."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache"), "DIST_TUNE_DEADLINE_S": "3"}
    assert all(each.error for each in on_ranks(2, run, "race", "skip collective", env=env))
    assert [events(path, "agreed") for path in journals(tmp_path)] == [[], []]
