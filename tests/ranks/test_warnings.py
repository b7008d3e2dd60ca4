"""Warnings of several ranks: one on the terminal for all of them, of the first rank that has it, and each in that rank's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import of_checkout, run_python

pytestmark = pytest.mark.processes

PROGRAM = """
import os
import torch
import torch.distributed as dist
from tests.steps import autotuned, launch, tuned

dist.init_process_group("gloo")
if str(dist.get_rank()) in os.environ["BLIND"]:
    os.environ.update(eval(os.environ["LATER"]))
kernel = autotuned(blocks=(16, 32))
step = tuned(kernel, is_dist=True)
for n in (64, 128):
    step(torch.zeros(n))
dist.destroy_process_group()
"""
REMEDIES = {
    "DIST_TUNE_CACHE_DIR": "tunings are not kept and will be repeated: {} cannot be written: {}. DIST_TUNE_CACHE_DIR names another folder",
    "DIST_TUNE_LOG_DIR": "dist_tune keeps no log: {} cannot be written: {}. DIST_TUNE_LOG_DIR names another folder",
    "DIST_TUNE_DEADLINE_S": "DIST_TUNE_DEADLINE_S='soon' cannot be read: need a number of seconds above 0",
    "DIST_TUNE_LOGDIR": "DIST_TUNE_LOGDIR is not read: did you mean DIST_TUNE_LOG_DIR?",
}


@pytest.mark.parametrize("blind", ["0123", "12"])
@pytest.mark.parametrize("name", REMEDIES)
def test_a_warning_of_several_ranks_is_printed_once(tmp_path: Path, name: str, blind: str):
    """By the first that has it, with its remedy and a line of the program; no other warning follows from the same cause."""
    (tmp_path / "file").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    value = str(tmp_path / "file") if name.endswith("_DIR") else "soon"
    env = of_checkout(tmp_path, BLIND=blind, LATER=repr({name: value}))
    done = run_python("program.py", cwd=tmp_path, env=env, n_ranks=4)
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "Warning: " in line]
    assert len(warned) == 1, done.stderr
    place, _, text = warned[0].partition(" UserWarning: ")
    words = REMEDIES[name].split("{}")
    assert all(each in text for each in words)
    assert len(words) == 1 or "a file is in the folder's place" in text
    assert text.startswith("rank 1: ") == (blind == "12")
    assert "autotuner.py" not in place
    logs = [(tmp_path / f".autotune_logs/rank-{rank}.log") for rank in range(4)]
    if name != "DIST_TUNE_LOG_DIR":
        assert [log.read_text().count(words[0]) for log in logs] == [int(str(rank) in blind) for rank in range(4)]
