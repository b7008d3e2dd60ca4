"""The end of a program that has tuned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
PROGRAM = r"""
import gc, sys, weakref

import torch
import torch.distributed as dist

from dist_tune import contextual_autotune
from tests.ranks.kernels import autotuned, launch

found = []
gc.disable()  # a collection may come too late as well
dist.init_process_group("gloo")
found.append(weakref.ref(dist.group.WORLD))
step = contextual_autotune(is_dist=True, cache=False, n_warmup=0, n_repeat=1)(lambda x: launch(autotuned(), x))
step(torch.arange(64.0))
dist.destroy_process_group()
sys.stdout.write(f"held {sum(each() is not None for each in found)}\n")
"""


def test_the_tuner_holds_no_process_group_that_was_destroyed(tmp_path: Path):
    """The threads of gloo's have aborted programs that had done all their work: they asked for an interpreter that was gone."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "DIST_TUNE_LOG_DIR": str(tmp_path),
        "DIST_TUNE_VERBOSITY": "quiet",
    }
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python(tmp_path / "program.py", cwd=tmp_path, env=env, n_ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held 0") == 2, done.stdout
