"""The README's example, run as its reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import ROOT
from tests.test_docs import program, run

pytestmark = pytest.mark.processes

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readmes_example_runs(tmp_path: Path):
    """Saved in an empty folder and started on two ranks, it prints the same winner on both, and
    leaves a log for each and records.

    It is the first example of docs/index.md, whose examples are one program.
    """
    (example,) = EXAMPLES
    page = (ROOT / "docs/index.md").read_text()
    assert example.removesuffix("dist.destroy_process_group()\n") in page
    done = run(tmp_path, program(page))
    assert done.returncode == 0, done.stderr
    # Two ranks may print on one line.
    winners = re.findall(r"rank \d: (BLOCK=\d+.*?), sum 262144", done.stdout)
    assert (len(winners), len(set(winners))) == (2, 1)
    for rank in range(2):
        assert "winner" in (tmp_path / f".autotune_logs/rank-{rank}.log").read_text()
    assert len(list(tmp_path.glob("cache/*/*.json"))) == 3


def test_the_readme_is_short():
    """At most 8 KB: the rest is in docs/."""
    assert len(README.encode()) <= 8192


def test_what_the_readme_points_to_exists():
    """Pages, pictures, and files named in commands."""
    prose = re.sub(r"```python.*?```", "", README, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^):#]+)\)", prose) + re.findall(
        r"\b((?:kernels|launch)/[\w/]+\.\w+)", README
    )
    assert [target for target in targets if not (ROOT / target).exists()] == []
