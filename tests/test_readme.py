"""The README's example, run as its reader would run it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.programs import run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readmes_example_runs(tmp_path: Path):
    """Saved in an empty folder and started on two ranks, it prints the same winner on both, and leaves a log for each and a record."""
    (example,) = EXAMPLES
    (tmp_path / "example.py").write_text(example)
    variables = {"CUDA_VISIBLE_DEVICES": "", "DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    done = run_python("example.py", cwd=tmp_path, env={**os.environ, **variables}, n_ranks=2)
    winners = re.findall(r"rank \d: (BLOCK=\d+.*?), sum 262144", done.stdout)  # two ranks may print on one line
    assert len(winners) == 2, done.stderr
    assert len(set(winners)) == 1
    for rank in range(2):
        assert "winner" in (tmp_path / f".autotune_logs/rank-{rank}.log").read_text()
    assert len(list(tmp_path.glob("cache/*/*.json"))) == 1


def test_the_readme_is_short():
    """At most 8 KB: the rest is in docs/."""
    assert len(README.encode()) <= 8192


def test_what_the_readme_points_to_exists():
    """Pages, pictures, and files named in commands."""
    prose = re.sub(r"```python.*?```", "", README, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^):#]+)\)", prose) + re.findall(r"\b((?:kernels|launch)/[\w/]+\.\w+)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []
