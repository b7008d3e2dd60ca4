"""The README's example, run as its reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readmes_example_runs(tmp_path: Path):
    """Saved and started with launch.sh, it prints the same winner on both ranks, and leaves a log for each."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "example.py").write_text(found[1])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [ROOT / "launch/launch.sh", "--nproc_per_node=2", "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    winners = re.findall(r"rank \d: (BLOCK_M=.*?num_stages=\d+)", done.stdout)  # two ranks may print on one line
    assert len(winners) == 2, done.stderr
    assert len(set(winners)) == 1
    for rank in range(2):
        assert "winner=" in (tmp_path / f".autotune_logs/rank-{rank}.log").read_text()
