"""The benchmark of first calls that hit: fresh processes, alone and on two ranks."""

import re
from pathlib import Path

import pytest

from benchmarks.tests.test_bench_cache import run

pytestmark = [pytest.mark.once, pytest.mark.processes, pytest.mark.slow]


def test_fresh_processes_hit_alone_and_on_two_ranks(tmp_path: Path) -> None:
    """A row for each step with its sites and times; a process that finds nothing in the cache would have failed it."""
    done = run(tmp_path, "-m", "benchmarks.bench_first_hit", "--steps", "one", "one-2-ranks", "--processes", "1", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(1 kernel\S*(?: 2 ranks)?) +. 1 +. [\d.]+ \([\d.]+\) +. [\d.]+ \([\d.]+\)", done.stdout)
    assert rows == ["1 kernel", "1 kernel, 2 ranks"]
