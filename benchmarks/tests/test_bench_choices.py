"""The benchmark of choices, on two ranks under the interpreter: that it runs, and what it prints."""

import os
from pathlib import Path

import pytest

from tests.programs import run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_tuning_has_its_line_and_the_library_needs_a_gpu(tmp_path: Path):
    """Two tunings of the small kernels; device times are for a GPU."""
    folders = {"DIST_TUNE_LOG_DIR": str(tmp_path / "logs"), "TRITON_CACHE_DIR": str(tmp_path / "triton"), "COLUMNS": "160"}
    command = [f"{ROOT}/benchmarks/bench_choices.py", "--tunings", "2", "--case", "gla", "--case", "small"]
    done = run_python(*command, cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1", **folders}, n_ranks=2)
    assert done.returncode == 0, done.stderr
    assert "gla needs a GPU" in done.stdout
    assert "small: 2 tunings" in done.stdout
    assert sum("+0.00%" in line and "│" in line for line in done.stdout.splitlines()) == 2
