"""``launch/launch.sh --supervise``: a job that loses a rank in a tuning comes back, and the tuning ends right."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.journaled import BLOCKS, launches

pytestmark = [pytest.mark.once, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
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
    got = tune(dist.get_rank(), Path(sys.argv[1]), tuple(json.loads(sys.argv[2])), device=device)
    Path(sys.argv[1], f"got-{dist.get_rank()}").write_text(json.dumps([got, os.environ["TORCHELASTIC_RESTART_COUNT"]]))
    dist.destroy_process_group()
"""


def supervised(folder: Path, ends: Any, device: str = "cpu") -> list[Any]:
    """Run the job on two ranks; what each rank ended with, and after how many restarts."""
    (folder / "job.py").write_text(JOB)
    env = {
        **os.environ,
        **({"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if device == "cpu" else {}),
        "DIST_TUNE_CACHE_DIR": str(folder / "cache"),
        "DIST_TUNE_LOG_DIR": str(folder / "logs"),
        "DIST_TUNE_DEADLINE_S": "10",
        "TMPDIR": str(folder),
    }
    command = [ROOT / "launch/launch.sh", "--supervise", folder / "job.py", folder, json.dumps(ends), device]
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=150, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"got-{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_costs_one_restart(tmp_path: Path, rank: int):
    """Killed in the sixth run, before ranks have agreed on a time: the second attempt is as long as a first one, and casts no suspicion."""
    (first, n_restarts), (second, _) = supervised(tmp_path, (0, rank, 6, "once"))
    assert n_restarts == "1"
    assert first["runs"] == second["runs"] <= len(BLOCKS) + 3
    assert first["best"] == second["best"]
    assert first["y"] == second["y"] == 2.0
    assert not list((tmp_path / "cache" / "journals").iterdir())


@pytest.mark.slow  # test_journals.py: the same without an agent
def test_a_config_that_ends_its_process_is_out_after_two_restarts(tmp_path: Path):
    """Once among others, once alone."""
    (first, n_restarts), (second, _) = supervised(tmp_path, (32, 1, 0, "exit"))
    assert n_restarts == "2"
    assert launches(tmp_path)[32, 1] == 2
    assert first["best"] == second["best"] != [[32]]
    assert "quarantined" in first["records"][0][3][BLOCKS.index(32)]
