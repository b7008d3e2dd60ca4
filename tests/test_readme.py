"""The README's examples, run as their reader would run them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.programs import run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
WINNERS = [r"BLOCK_M=.*?num_stages=\d+", r"n_chunks=\d"]
"""What each prints of its winner."""


@pytest.mark.parametrize(("example", "winner"), list(zip(EXAMPLES[:2], WINNERS, strict=True)), ids=["step", "function"])
def test_the_readmes_examples_run(tmp_path: Path, example: str, winner: str):
    """Saved and started as launch.sh does on a CPU, each prints the same winner on both ranks, and leaves a log for each and a record."""
    (tmp_path / "example.py").write_text(example)
    variables = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    done = run_python("example.py", cwd=tmp_path, env={**os.environ, **variables}, n_ranks=2)
    winners = re.findall(rf"rank \d: ({winner})", done.stdout)  # two ranks may print on one line
    assert len(winners) == 2, done.stderr
    assert len(set(winners)) == 1
    for rank in range(2):
        assert "winner=" in (tmp_path / f".autotune_logs/rank-{rank}.log").read_text()
    assert len(list(tmp_path.glob("cache/*/*.json"))) == 1


def test_the_example_of_a_tuning_script_runs(tmp_path: Path):
    """By itself, without ranks: the config that sleeps least."""
    assert len(EXAMPLES) == 3
    (tmp_path / "example.py").write_text(EXAMPLES[2])
    done = run_python("example.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "{'BLOCK': 16}\n"), done.stderr
